"""``task=convert``: writes a checkpoint folder in another format, and optionally merges a LoRA adapter into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.progress import progress
from model import ModelConfig, convert_checkpoint
from model.checkpoint.names import MERGED
from model.parallel.ranks import RankGroup
from train.config.schema import Conversion
from train.distributed.workers import work_together
from train.errors import user_errors
from train.lora.peft_format import merged_record, read_changes


def run(config: Conversion) -> None:
    """Write the converted checkpoint into the new folder ``config.dst``. If writing fails, no folder is left behind.

    Raises:
        InputError: the source is not a complete checkpoint of this model (the message lists all bad tensors), the
            adapter does not belong to the source or is already merged, or the destination exists.
        OSError: a file is missing or cannot be written.
    """
    with user_errors(), progress("converting", 1.0) as done:
        size = work_together(config.processes, _convert, config, done)
    print(f"wrote {config.dst}: {size:,} bytes of tensors, format={config.format}")


def _convert(config: Conversion, ranks: RankGroup, done: Callable[[float], None]) -> int:
    """Convert this process's part of the rows."""
    changes, files = None, {}
    if config.adapter:
        changes = read_changes(Path(config.adapter), ModelConfig.load(config.src).text.n_routed_experts)
        files = {MERGED: merged_record(Path(config.adapter), Path(config.src))}
    return convert_checkpoint(
        config.src, config.dst, config.format, changes=changes, files=files, done=done, ranks=ranks
    )
