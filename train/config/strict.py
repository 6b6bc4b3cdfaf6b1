"""Settings for the dataclass of every section: unknown keys, values of the wrong type and NaN are refused."""

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
