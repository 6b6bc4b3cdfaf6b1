"""Saves, loads and exports of a model whose every number is known, in any layout: run by every rank of a test, and by
the test alone.

python tests/distributed/folders.py FOLDER CORPUS JOB...   (a job: what:layout:arguments, for example save:ep2t2:1)
"""

from __future__ import annotations

import os
import re
import signal
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed"), str(ROOT / "tests" / "model")]
import steps  # noqa: E402
from tiny import tiny_config  # noqa: E402

from model import build_model, load_weights, save_pretrained  # noqa: E402
from model.checkpoint.names import allocate_scales, released_tensors, scale_parts  # noqa: E402
from model.checkpoint.released import file_headers, packing_of  # noqa: E402
from model.parallel.ranks import Parallel, RankGroup, rows_here  # noqa: E402
from optim import Optimizer, Rule, assign  # noqa: E402
from train.build import Run, build, placement_of  # noqa: E402
from train.checkpoint import run_state, storage  # noqa: E402
from train.checkpoint.background import Background  # noqa: E402
from train.checkpoint.run_state import TrainerState  # noqa: E402
from train.distributed.dense import shard_dense  # noqa: E402
from train.distributed.launch import launch  # noqa: E402
from train.distributed.launchers import find_process, run_to_the_end  # noqa: E402
from train.distributed.world import World, axis_group, rank_mesh  # noqa: E402
from train.loop import train_step  # noqa: E402

RULES = [
    Rule(r"embed\.weight|head\.weight|.*engram\.embed\.weight", "sinkhorn"),
    Rule(r".*experts\.w\d|.*\.wq_[ab]\.weight", "muon"),
    Rule(".*", "adamw"),
]
CPU = torch.device("cpu")
UNTRAINED = "norm.weight"  # has no optimizer state


def known(name: str, shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """The numbers of a whole tensor."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {salt}".encode()))
    return torch.randn(shape, generator=draw)


def known_scales(name: str, shape: tuple[int, ...], salt: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} scales {salt}".encode()))
    return torch.randint(100, 130, shape, dtype=torch.uint8, generator=draw).view(torch.float8_e8m0fnu)


def rows_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shard = getattr(like, "shard", None)
    return tensor if shard is None else tensor[shard.start : shard.stop]


def owned(state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter's state that its owner has: all of it where only the weight is divided
    (`optim.row_exchange`).
    """
    return state if isinstance(parameter, DTensor) else rows_of(state, parameter)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    shard = getattr(tensor, "shard", None)
    return tuple(tensor.shape) if shard is None else (shard.total, *tensor.shape[1:])


class Place:
    """A model and an optimizer in one layout."""

    def __init__(self, layout: str, salt: int = 0, **changes: object):
        experts, tables, embeddings, dense = re.fullmatch(r"ep(\d)t(\d)(s?)(?:d(\d))?", layout).groups()
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        groups = {int(n): split(int(n), rank, size) for n in sorted({experts, tables})}
        mesh = rank_mesh(int(dense), CPU) if dense else None
        keepers = axis_group(mesh, "parts") if mesh is not None else RankGroup()
        parallel = Parallel(groups[int(experts)][0], groups[int(tables)][0], bool(embeddings), dense=keepers)
        everyone = RankGroup(dist.group.WORLD, rank, size) if size > 1 else RankGroup()
        replica_groups = {n: same for n, (_, same) in groups.items()} | {1: everyone}
        world = World(CPU, rank, size, parallel, replica_groups, dense_mesh=mesh)
        self.config = tiny_config(vision=True, engram=True, **changes)
        token_map = torch.arange(self.config.text.vocab_size) % 50
        self.model = build_model(self.config, token_map=token_map, parallel=parallel)
        if mesh is not None:
            shard_dense(self.model, mesh, keepers, bf16=False)
        places = {n: placement_of(p, world) for n, p in self.model.named_parameters()} if size > 1 else None
        self.optimizer = Optimizer(assign(self.model.named_parameters(), RULES), placements=places)
        self.salt = salt
        if salt:
            self.fill()

    def named_state(self):
        for group in self.optimizer.param_groups:
            keys = ("mean", "square") if group["method"] == "adamw" else ("momentum",)
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if name != UNTRAINED:
                    yield name, parameter, keys

    @torch.no_grad()
    def fill(self) -> None:
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            rows_here(tensor).copy_(rows_of(known(name, whole_shape(tensor), self.salt), tensor))
        for name, parameter, keys in self.named_state():
            if self.optimizer.owns(parameter):
                state = self.optimizer.state[parameter]
                for key in keys:
                    state[key] = owned(known(f"{name} {key}", whole_shape(parameter), self.salt), parameter).clone()
                if keys[0] == "mean":
                    state["step"] = 3
        allocate_scales(self.model, {part.name for part in released_tensors(self.model) if packing_of(part.name)})
        for part in scale_parts(self.model):
            part.tensor.copy_(known_scales(part.name, part.shape, self.salt)[part.rows])

    def check(self, salt: int, state: bool = True) -> None:
        """Every number is the one known, to the bit; and what is nobody else's is not here."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            assert torch.equal(rows_here(tensor), rows_of(known(name, whole_shape(tensor), salt), tensor)), name
        scales = list(scale_parts(self.model))
        held = {part.name for part in released_tensors(self.model) if part.tensor is not None and packing_of(part.name)}
        assert {part.name for part in scales} == held
        for part in scales:
            wanted = known_scales(part.name, part.shape, salt)[part.rows]
            assert torch.equal(part.tensor.view(torch.uint8), wanted.view(torch.uint8)), part.name
        for name, parameter, keys in self.named_state() if state else ():
            found = self.optimizer.state.get(parameter, {})
            if not self.optimizer.owns(parameter):
                assert not found, name
                continue
            assert found.keys() == {*keys, *(["step"] if keys[0] == "mean" else [])}, name
            for key in keys:
                wanted = known(f"{name} {key}", whole_shape(parameter), salt)
                assert torch.equal(found[key], owned(wanted, parameter)), (name, key)
            assert found.get("step", 3) == 3

    def save(self, folder: Path, background: Background | None = None) -> Path:
        torch.manual_seed(100 * self.salt + storage.rank())
        return run_state.save(
            folder, TrainerState(step=self.salt), model=self.model, optimizer=self.optimizer, data={"row": self.salt},
            model_config=self.config.to_dict(), keep=9, background=background,
        )  # fmt: skip

    def load(self, folder: Path, step: int) -> TrainerState:
        return run_state.load(
            folder / f"step-{step:08d}", model=self.model, optimizer=self.optimizer,
            set_data=lambda data: check_equal(data, {"row": step}), model_config=self.config.to_dict(),
        )  # fmt: skip


def check_equal(found: object, wanted: object) -> None:
    assert found == wanted, (found, wanted)


def split(parts_: int, rank: int, size: int) -> tuple[RankGroup, RankGroup]:
    """(consecutive ranks that split a parameter, strided ranks that hold the same part)."""
    if parts_ == 1:
        return RankGroup(), RankGroup(dist.group.WORLD, rank, size) if size > 1 else RankGroup()
    rows = [list(range(first, first + parts_)) for first in range(0, size, parts_)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    made = [(members, dist.new_group(members)) for members in rows + columns]
    across, same = (RankGroup(group, members.index(rank), len(members)) for members, group in made if rank in members)
    return across, same


def save(folder: Path, layout: str, step: int, how: str = "") -> None:
    place = Place(layout, step)
    if not how:
        place.save(folder)
        return
    with Background() as background:
        final = place.save(folder, background)
        with torch.no_grad():  # training goes on
            for tensor in place.model.state_dict().values():
                tensor.add_(1)
    written = file_headers(final / f"rank-{storage.rank():05d}.safetensors")
    check_equal(set(background._buffers), {name.partition("[")[0] for name in written})  # nothing else was copied


def load(folder: Path, layout: str, step: int, saved_by: int = 0) -> None:
    """``saved_by``: how many ranks wrote it; each continues its own random numbers."""
    place = Place(layout)
    torch.manual_seed(7)
    check_equal(place.load(folder, step), TrainerState(step=step))
    place.check(step)
    seed = 100 * step + storage.rank() if storage.rank() < saved_by else 7
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))


def export(folder: Path, layout: str, step: int, kind: str, name: str) -> None:
    """Small shards, so that ranks meet in one file and also have their own."""
    place = Place(layout, step)
    save_pretrained(place.model, folder / name, format=kind, shard_bytes=30_000, ranks=storage.ranks())


def import_(folder: Path, layout: str, step: int, name: str) -> None:
    """What `export` wrote in full precision, with its scales."""
    place = Place(layout)
    load_weights(place.model, folder / name)
    place.check(step, state=False)


def through(folder: Path, layout: str, source: str, target: str) -> None:
    """A quantised folder read and written again."""
    place = Place(layout)
    load_weights(place.model, folder / source)
    save_pretrained(place.model, folder / target, format="released", shard_bytes=30_000, ranks=storage.ranks())


def refuse(folder: Path, layout: str, step: int) -> None:
    place = Place(layout, 77, hidden_size=48)
    try:
        place.load(folder, step)
    except run_state.CheckpointError as error:
        assert "model.text_config.hidden_size is 32, expected 48" in str(error)
        place.check(77)
        return
    raise AssertionError("another model was loaded")


def fail(folder: Path, layout: str, step: int) -> None:
    """The disk of rank 1 is full; all ranks must say so, and nothing must be left."""
    place, write = Place(layout, step), storage.write_files

    def full(files: dict) -> None:
        if storage.rank() == 1:
            raise OSError(28, "No space left on device")
        write(files)

    storage.write_files = full
    for attempt in (place.save, lambda folder: save_pretrained_to(place, folder)):
        before = sorted(path.name for path in folder.iterdir())
        try:
            attempt(folder)
        except OSError as error:
            assert "No space left on device" in str(error), error
        else:
            raise AssertionError("nobody noticed")
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == before
    storage.write_files = write


def save_pretrained_to(place: Place, folder: Path) -> None:
    import model.checkpoint.released

    fill = model.checkpoint.released._fill

    def full(path: Path, layout: object) -> int:
        if storage.rank() == 1:
            raise OSError(28, "No space left on device")
        return fill(path, layout)

    model.checkpoint.released._fill = full
    try:
        save_pretrained(place.model, folder / "never", ranks=storage.ranks())
    finally:
        model.checkpoint.released._fill = fill


def die(folder: Path, layout: str, step: int, how: str = "") -> None:
    """Rank 1 is killed when its file is written but the folder is not complete."""
    write = storage.write_files

    def killed(files: dict) -> None:
        write(files)
        if storage.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    storage.write_files = killed
    save(folder, layout, step, how)


def train(folder: Path, layout: str, first: int, last: int, source: str, target: str) -> None:
    """Real steps, from the state of ``source`` on if any were made before; the state after every second."""
    run = made(layout, folder)
    state = resume(run, folder / source, first) if first else TrainerState()
    for step in range(first, last):
        train_step(run, steps.share(steps.rows_of_step(step), run), step, 0)
        if step % 2:
            run_state.save(
                folder / target, TrainerState(step=step + 1, tokens=state.tokens), model=run.model,
                optimizer=run.optimizer, data={}, model_config=run.model_config.to_dict(), keep=9,
            )  # fmt: skip


def made(layout: str, folder: Path) -> Run:
    """The run in a layout: experts over epN ranks, dense matrices over dN, rows over cN, and with o block inputs are
    recomputed from and kept in host memory.
    """
    *numbers, offload = re.fullmatch(r"ep(\d)(?:d(\d))?(?:c(\d))?(o?)", layout).groups(default="1")
    experts, dense, context = map(int, numbers)
    size = find_process().size
    config = steps.configure("passes", size, experts, CORPUS[0], dense, context)
    if offload == "o":
        config = replace(config, runtime=replace(config.runtime.recomputing(True), offload="inputs"))
    return build(config, steps.at(WORLD[0], experts, dense, context) if size > 1 else WORLD[0])


def resume(run: Run, folder: Path, step: int) -> TrainerState:
    return run_state.load(
        folder / f"step-{step:08d}", model=run.model, optimizer=run.optimizer, set_data=lambda data: None,
        model_config=run.model_config.to_dict(),
    )  # fmt: skip


JOBS = {"save": save, "load": load, "export": export, "import": import_, "through": through, "refuse": refuse,
        "fail": fail, "die": die, "train": train}  # fmt: skip


WORLD = [World(CPU)]
CORPUS: list[Path] = []


def run(folder: Path, corpus: Path, jobs: list[str]) -> None:
    CORPUS[:] = [corpus]
    WORLD[0] = launch(steps.configure("passes", find_process().size, 1, corpus).parallel)
    with WORLD[0].collective_guard():
        for job in jobs:
            what, layout, *rest = job.split(":")
            JOBS[what](folder, layout, *(int(part) if part.isdigit() else part for part in rest))
            print(f"done {job}", flush=True)


if __name__ == "__main__":
    where, texts = map(Path, sys.argv[1:3])
    run_to_the_end(lambda: run(where, texts, sys.argv[3:]))
