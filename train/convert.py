"""``task=convert``: a checkpoint folder in another format."""

from __future__ import annotations

from model import convert_checkpoint
from train.config import Conversion
from train.errors import given


def run(config: Conversion) -> None:
    """Write ``config.dst`` whole or not at all.

    Raises:
        InputError: the source is no complete checkpoint of this model (every tensor at fault is named), or the
            destination exists.
        OSError: a file is missing or cannot be written.
    """
    with given():
        size = convert_checkpoint(config.src, config.dst, config.format)
    print(f"wrote {config.dst}: {size:,} bytes of tensors, format={config.format}")
