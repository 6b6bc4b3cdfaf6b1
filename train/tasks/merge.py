"""``task=merge``: writes the weighted average of several checkpoints of one model.

Averaging makes sense for runs that started from the same weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data import DataConfig
from data.progress import progress
from data.tokenizer_files import tokenizer_files
from model import ModelConfig, merge_checkpoints
from model.checkpoint.names import COMPANIONS
from model.engram import engram_tables
from model.parallel.ranks import RankGroup
from train.checkpoint.init_from import Pretrained, find_pretrained, open_pretrained
from train.checkpoint.run_state import first_difference
from train.config.schema import Merger
from train.distributed.workers import work_together
from train.errors import InputError, user_errors


def run(config: Merger) -> None:
    """Write the merged checkpoint into the new folder ``config.dst``. If writing fails, no folder is left behind.

    Only a few rows of every checkpoint are in memory at a time.

    Raises:
        InputError: a checkpoint is incomplete, models or tokenizers of the checkpoints differ (the message names the
            first difference), a value is not finite, or the destination exists.
        OSError: a file is missing or cannot be written.
    """
    if Path(config.dst).exists():
        raise InputError(f"{config.dst} exists already; name a new folder")
    with user_errors():
        origins = [find_pretrained(name) for name in config.checkpoints]
        for other in origins[1:]:
            check_same(origins[0], other)
        with progress("merging", 1.0) as done:
            size, left_out = work_together(config.processes, _merge, (config, origins), done)
    for origin, share in zip(origins, config.shares, strict=True):
        print(f"{share:.6g} x {origin.folder}")
    if left_out:
        print(f"{len(left_out)} drafter tensors ({left_out[0]}, ...) are left out: not every checkpoint has them")
    print(f"wrote {config.dst}: {size:,} bytes of tensors, format={config.format}")


def _merge(
    job: tuple[Merger, list[Pretrained]], ranks: RankGroup, done: Callable[[float], None]
) -> tuple[int, list[str]]:
    """Merge this process's part of the rows. Returns the result of ``merge_checkpoints``."""
    config, origins = job
    with ExitStack() as stack:
        return merge_checkpoints(
            [stack.enter_context(open_pretrained(origin)) for origin in origins],
            config.shares,
            ModelConfig.from_dict(origins[0].model),
            config.dst,
            config.format,
            companions(origins[0]),
            done=done,
            ranks=ranks,
        )


def check_same(first: Pretrained, other: Pretrained) -> None:
    """Raise ``InputError`` if two checkpoints have different models or tokenizers; the error names the first
    difference.
    """
    wanted, found = ({"model": _model(origin), "tokenizer": origin.tokens()} for origin in (first, other))
    for key in wanted:
        difference = first_difference(found[key], wanted[key], key)
        if difference:
            shown = difference if len(difference) <= 300 else f"{difference[:300]} ..."
            raise InputError(
                f"{other.folder} cannot be merged with {first.folder}, because it has another {key}: {shown}. "
                "Merge checkpoints of the same model and tokenizer"
            )


def companions(origin: Pretrained) -> dict[str, str]:
    """Return the small files for the merged checkpoint, such as the tokenizer's.

    If ``origin`` is a checkpoint folder, its files are returned; if ``origin`` is a run, the files that an export of
    the run would contain.
    """
    if origin.tokenizer.parent == origin.folder:
        paths = [origin.folder / name for name in COMPANIONS]
        return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    text = origin.tokenizer.read_text(encoding="utf-8")
    files = tokenizer_files(DataConfig(tokenizer=str(origin.tokenizer)), Tokenizer.from_str(text))
    return {"tokenizer.json": text, **files}


def _model(origin: Pretrained) -> dict[str, Any]:
    """Return the model configuration of a checkpoint; missing row counts of Engram tables are added."""
    config = ModelConfig.from_dict(origin.model)
    text = config.text
    if text.engram_layer_ids and not text.engram_num_embeddings:
        text = dataclasses.replace(text, engram_num_embeddings=engram_tables(text).rows)
    return dataclasses.replace(config, text=text, extra={}).to_dict()
