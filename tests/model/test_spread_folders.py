"""A part of a spread model reads its own rows and experts, and folders of any size pass through little memory. What
several processes write together: tests/distributed/test_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import model.checkpoint.released
import model.checkpoint.save
from model import build_model, load_weights, open_folder, save_pretrained
from model.checkpoint.names import released_tensors
from model.checkpoint.released import deal_rows, packing_of
from model.parallel.ranks import Parallel, RankGroup
from tests import processes
from tests.model.tiny import tiny_config, tiny_model

PART = Parallel(experts=RankGroup(None, 1, 2), tables=RankGroup(None, 2, 4), shard_embeddings=True)


def part_of_a_model(**changes):
    config = tiny_config(engram=True, **changes)
    return build_model(config, token_map=torch.arange(config.text.vocab_size) % 50, parallel=PART, seed=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Quantised; the scales stay beside the plain folder of the same values."""
    path = tmp_path_factory.mktemp("spread")
    save_pretrained(tiny_model(engram=True), path / "released", format="released", shard_bytes=20_000)
    whole = build_model(tiny_config(engram=True), token_map=torch.arange(61) % 50)
    load_weights(whole, path / "released")
    save_pretrained(whole, path / "plain")
    return path


@pytest.mark.parametrize("kind", ["released", "plain"])
def test_a_part_is_loaded_from_its_own_rows(folder: Path, kind: str, monkeypatch) -> None:
    whole, part, read = tiny_model(engram=True, seed=1), part_of_a_model(), []
    load_weights(whole, folder / kind)
    original = model.checkpoint.released.Shards.read

    def watched(self, name, rows=None):
        read.append((name, rows))
        return original(self, name, rows)

    monkeypatch.setattr(model.checkpoint.released.Shards, "read", watched)
    load_weights(part, folder / kind)
    state = whole.state_dict()
    for name, tensor in part.state_dict(keep_vars=True).items():
        shard = getattr(tensor, "shard", None)
        assert torch.equal(tensor, state[name] if shard is None else state[name][shard.start : shard.stop]), name
    for name, scales in part.released_scales.items():
        rows = (
            next(p.rows for p in released_tensors(part) if p.name == name) if ".engram.embed." in name else slice(None)
        )
        assert torch.equal(scales.view(torch.uint8), whole.released_scales[name][rows].view(torch.uint8)), name
    assert part.released_scales.keys() < whole.released_scales.keys()
    experts = {name.split(".experts.")[1][0] for name, _ in read if ".ffn.experts." in name}
    assert experts == {"2", "3"}
    for name in ("embed.weight", "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"):
        spans = [rows for found, rows in read if found == name]
        mine = part.get_submodule(name.rpartition(".")[0]).shard
        if spans or kind == "released":
            assert min(rows.start for rows in spans) == mine.start and max(rows.stop for rows in spans) == mine.stop


def test_a_part_alone_is_not_saved(tmp_path) -> None:
    with pytest.raises(ValueError, match="split over 4 processes, so all of these must save it together, not 1"):
        save_pretrained(part_of_a_model(), tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [2, 3, 7])
def test_rows_are_dealt_out_whole_and_evenly(folder: Path, size: int) -> None:
    """Every row of every tensor goes to exactly one process, cut at tiles, and each gets its share of every kind."""
    with open_folder(folder / "released") as tensors:
        dealt = [list(deal_rows(tensors.values(), RankGroup(None, rank, size))) for rank in range(size)]
        got: dict[object, list[int]] = {}
        for parts in zip(*dealt, strict=True):
            whole = torch.cat(list(tensors[parts[0].name].blocks()))
            pieces = [torch.cat([*part.blocks(), whole[:0]]) for part in parts]
            assert torch.equal(torch.cat(pieces), whole), parts[0].name
            starts = [part.start for part, piece in zip(parts, pieces, strict=True) if len(piece)]
            assert starts == sorted(starts) and not any(start % 32 for start in starts)
            kinds = got.setdefault(packing_of(parts[0].name), [0] * size)
            kinds[:] = [had + piece.numel() for had, piece in zip(kinds, pieces, strict=True)]
    slack = 2 * 32 * 128  # a cut may be 32 rows away from where the share ends
    assert len(got) == 4 and all(max(shares) - min(shares) <= slack for shares in got.values()), got


def anonymous_mib() -> float:
    """Memory of this process that is not a mapped file."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by /proc")
def test_memory_beside_the_model_is_a_few_blocks(tmp_path) -> None:
    """Of 258 MiB of weights in one table; a block is 4 MiB, and its passage takes several copies of it, which the C
    library keeps for a while. A copy of the table would be more than the limit. In a process of its own, for what
    other tests have left in the memory of this one would count too, or hide it.
    """
    (grown,) = processes.run(1, growth, tmp_path)
    assert max(grown.values()) < 200, grown


def growth(rank: int, folder: Path) -> dict[str, float]:
    """MiB by which memory grew at most, by what was done."""
    built = tiny_model(engram=True, engram_num_embeddings=[2**20 + 7, 1000], engram_head_dim=64)
    assert sum(parameter.numel() * 4 for parameter in built.parameters()) / 2**20 > 256
    peak, grown = [0.0], {}
    original = model.checkpoint.released.row_blocks

    def watched(*args):
        for rows in original(*args):
            yield rows
            peak[0] = max(peak[0], anonymous_mib())

    model.checkpoint.released.row_blocks = model.checkpoint.save.row_blocks = watched
    save_pretrained(built, folder / "warm", format="released")
    for format in ("released", "plain"):
        peak[0] = before = anonymous_mib()
        save_pretrained(built, folder / format, format=format)
        grown[f"saving {format}"] = peak[0] - before
        peak[0] = before = anonymous_mib()
        load_weights(built, folder / format)
        grown[f"loading {format}"] = peak[0] - before
    return grown
