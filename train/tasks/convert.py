"""``task=convert``: writes a checkpoint folder in another format, and optionally merges a LoRA adapter into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.progress import progress
from model import ModelConfig, convert_checkpoint
from model.checkpoint.convert import Converted
from model.checkpoint.names import MERGED
from model.checkpoint.released import is_quantised
from model.checkpoint.save import whole_folder
from model.parallel.ranks import RankGroup
from train.config.schema import Conversion
from train.distributed.workers import work_together
from train.errors import user_errors
from train.lora.peft_format import Adapter, merged_record, read_adapter
from train.lora.serving import ADAPTER, BASE, link_folder, merge_report, split_for_serving, write_for_serving


def run(config: Conversion) -> None:
    """Write the converted checkpoint into the new folder ``config.dst``. If writing fails, no folder is left behind.

    Raises:
        InputError: the source is not a complete checkpoint of this model (the message lists all bad tensors), the
            adapter does not belong to the source or is already merged, or the destination exists.
        OSError: a file is missing or cannot be written.
    """
    with user_errors(), progress("converting", 1.0) as done:
        written = work_together(config.processes, _keep if config.keep else _convert, config, done)
    for line in merge_report(written.arrived):
        print(line)
    print(f"wrote {config.dst}: {written.nbytes:,} bytes of tensors, format={config.format}")
    if config.keep:
        print(f"the adapter is in {Path(config.dst) / ADAPTER}, the weights that it belongs to in {config.dst}/{BASE}")


def _convert(config: Conversion, ranks: RankGroup, done: Callable[[float], None]) -> Converted:
    """Convert this process's part of the rows."""
    changes, files = None, {}
    if config.adapter:
        changes = _read(config).changes()
        files = {MERGED: merged_record(Path(config.adapter), Path(config.src))}
    return convert_checkpoint(
        config.src, config.dst, config.format, changes=changes, files=files, done=done, ranks=ranks
    )


def _keep(config: Conversion, ranks: RankGroup, done: Callable[[float], None]) -> Converted:
    """Write the part of the adapter that serving engines can add, and the base with the rest of the adapter merged."""
    assert config.adapter is not None
    src, dst = Path(config.src), Path(config.dst)
    if dst.exists():
        raise ValueError(f"{dst} already exists; choose a new folder")
    beside, rest = split_for_serving(_read(config))
    if not beside.factors:
        raise ValueError(
            f"{config.adapter} changes nothing that serving engines add to packed weights (attention, shared and "
            "routed experts); leave out keep=true to merge it"
        )
    record = merged_record(Path(config.adapter), src)
    same = config.format == "released" and is_quantised(ModelConfig.load(src).to_dict())
    with whole_folder(dst, ranks) as work:
        if ranks.rank == 0:
            write_for_serving(beside, work / ADAPTER, str(dst / BASE))
        if not (changes := rest.changes()) and same:
            return Converted(link_folder(src, work / BASE) if ranks.rank == 0 else 0, {})
        files = {MERGED: record} if changes else {}
        return convert_checkpoint(src, work / BASE, config.format, changes=changes, files=files, done=done, ranks=ranks)


def _read(config: Conversion) -> Adapter:
    assert config.adapter is not None
    return read_adapter(Path(config.adapter), ModelConfig.load(config.src).text.n_routed_experts)
