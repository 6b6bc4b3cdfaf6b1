"""``task=convert``: a checkpoint folder in another format."""

from __future__ import annotations

from model import convert_checkpoint
from train.config import Conversion


def run(config: Conversion) -> None:
    """Write ``config.dst`` whole or not at all.

    Raises:
        ValueError: the source is no complete checkpoint of this model (every tensor at fault is named), or the
            destination exists.
    """
    try:
        size = convert_checkpoint(config.src, config.dst, config.format)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    print(f"wrote {config.dst}: {size:,} bytes of tensors, format={config.format}")
