"""How every section of the configuration is declared: unknown keys, values of another type and NaN are refused."""

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
