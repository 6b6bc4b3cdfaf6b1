"""Frozen weights that stay packed: values, losses and gradients of the unpacked model, from the bytes of the file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import Tensor

import model.packed
from model import DeepseekV41, ForwardOptions, load_pretrained, save_pretrained
from model.packed import PackedWeight, frozen, held_bytes, packed_block_linear, packed_grouped_linear
from model.parallel.ranks import Parallel
from model.quantize import FP4_ROWS, FP8_ROWS, FP8_TILES, Packing, pack, unpack
from tests import processes
from tests.model.test_parallel import ranks_of
from tests.model.tiny import tiny_model, tokens

WORDS = Tokenizer(models.WordLevel({f"w{n}": n for n in range(61)}, unk_token="w0"))


def packed_and_plain(packing: Packing, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight packed, and the values that it stands for."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    pairs = [pack(matrix, packing) for matrix in weight.view(-1, *shape[-2:])]
    plain = torch.stack([unpack(*pair, packing) for pair in pairs]).view(shape).to(dtype)
    codes, scale = (torch.stack(part) for part in zip(*pairs, strict=True))
    front = shape[:-2]
    return frozen(
        codes.unflatten(0, front or (1,)) if front else codes[0], scale if front else scale[0], packing, dtype
    ), plain


def saved_by(f) -> tuple[Tensor, list[type]]:
    """What `f` gives, and the types of what autograd saves for its backward."""
    saved: list[type] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(type(tensor)) or tensor, lambda x: x):
        return f(), saved


@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96)])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_layer_gives_the_values_and_saves_the_bytes(shape: tuple[int, ...], autocast: bool) -> None:
    weight, plain = packed_and_plain(FP8_TILES, 70, 96)  # partial tiles at both edges
    layer = torch.nn.Linear(96, 70, bias=False)
    layer.weight = weight
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, saved = saved_by(lambda: layer(inputs[0]))
        expected = F.linear(inputs[1], plain)
    assert torch.equal(out, expected) and saved == [PackedWeight]
    for result in (out, expected):
        result.sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_a_stack_of_experts_is_unpacked_expert_by_expert(monkeypatch) -> None:
    weight, plain = packed_and_plain(FP4_ROWS, 4, 8, 64)
    ends = torch.tensor([3, 3, 7, 12], dtype=torch.int32)  # the second expert gets no token
    inputs = [torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    unpacked: list[torch.Size] = []

    def watched(codes: Tensor, scale: Tensor, packing: Packing) -> Tensor:
        unpacked.append(codes.shape)
        return unpack(codes, scale, packing)

    monkeypatch.setattr(model.packed, "unpack", watched)
    out, saved = saved_by(lambda: packed_grouped_linear(inputs[0], weight, ends))
    expected = F.grouped_mm(inputs[1], plain.transpose(1, 2), offs=ends)
    assert torch.equal(out, expected) and saved == []
    for result in (out, expected):
        result.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert unpacked == [torch.Size([8, 32])] * 6, "each matrix alone, in the forward and again in the backward"


def test_the_grouped_output_projection() -> None:
    weight, plain = packed_and_plain(FP8_TILES, 64, 32)
    inputs = [torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    out = packed_block_linear(inputs[0], weight, 2)
    expected = torch.einsum("tgi,goi->tgo", inputs[1], plain.unflatten(0, (2, -1)))
    assert torch.equal(out, expected)
    for result in (out, expected):
        result.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_a_look_up_unpacks_the_rows_that_it_reads(monkeypatch) -> None:
    weight, plain = packed_and_plain(FP8_ROWS, 50, 40)
    read: list[int] = []

    def watched(codes: Tensor, scale: Tensor, packing: Packing) -> Tensor:
        read.append(len(codes))
        return unpack(codes, scale, packing)

    monkeypatch.setattr(model.packed, "unpack", watched)
    ids = torch.randint(0, 50, (3, 4), generator=torch.Generator().manual_seed(1))
    assert torch.equal(F.embedding(ids, weight), plain[ids])
    assert torch.equal(weight.index_select(0, ids[0]), plain[ids[0]])
    assert read == [12, 4]


def test_copies_share_the_bytes_and_writes_are_refused() -> None:
    weight, plain = packed_and_plain(FP8_TILES, 70, 96)
    layer = torch.nn.Linear(96, 70, bias=False)
    layer.weight = weight
    copied = copy.deepcopy(layer)
    assert copied.weight.codes.data_ptr() == layer.weight.codes.data_ptr()
    assert layer.to(torch.bfloat16).weight.dtype == torch.bfloat16 and isinstance(layer.weight, PackedWeight)
    assert torch.equal(layer.weight[32:64], plain[32:64].bfloat16()) and torch.equal(
        layer.weight[5:9], plain[5:9].bfloat16()
    )
    with pytest.raises(RuntimeError, match="task=convert src=BASE adapter=ADAPTER"):
        layer.weight.data.add_(1.0)


def folder_of(tmp_path: Path, **changes) -> Path:
    save_pretrained(tiny_model(**changes), tmp_path / "quantised", WORDS, format="released")
    return tmp_path / "quantised"


def trained_below(built: DeepseekV41) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and logits of a batch, and the gradient of what is below every packed weight."""
    ids = tokens(2, 40)
    built.requires_grad_(False)
    built.embed.weight.requires_grad_(True)
    total = built.losses(ids, ids, built.loss_denominators(ids, ids)).total
    total.backward()
    with torch.no_grad():
        return total.detach(), built(ids).logits, built.embed.weight.grad


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_with_packed_weights_is_the_unpacked_one(tmp_path: Path, recompute: bool) -> None:
    folder = folder_of(tmp_path)
    plain, packed = (
        load_pretrained(folder, packed=keep, runtime=ForwardOptions(recompute=recompute)) for keep in (False, True)
    )
    kept = [parameter for parameter in packed.parameters() if isinstance(parameter, PackedWeight)]
    assert len(kept) == 69 and not any(isinstance(parameter, PackedWeight) for parameter in plain.parameters())
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert sum(map(held_bytes, packed.parameters())) < on_disk + 2 * sum(
        held_bytes(p) for p in packed.parameters() if not isinstance(p, PackedWeight)
    )
    for ours, theirs in zip(trained_below(packed), trained_below(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_it_is_written_as_it_was_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    plain, packed = (load_pretrained(folder, packed=keep) for keep in (False, True))
    save_pretrained(packed, tmp_path / "again", format="released")
    save_pretrained(packed, tmp_path / "values")
    save_pretrained(plain, tmp_path / "expected")
    for ours, theirs in (("again", "quantised"), ("values", "expected")):
        for file in (tmp_path / theirs).glob("[!t]*"):  # all but the tokenizer
            assert file.read_bytes() == (tmp_path / ours / file.name).read_bytes(), file.name


def test_a_plain_folder_has_nothing_to_keep_packed(tmp_path: Path) -> None:
    save_pretrained(tiny_model(), tmp_path / "plain")
    loaded = load_pretrained(tmp_path / "plain", packed=True)
    assert not any(isinstance(parameter, PackedWeight) for parameter in loaded.parameters())


ENGRAM = dict(engram=True, engram_compressed_vocab_size=64)
HOST = ForwardOptions(tables="host")


def test_tables_on_the_host_are_the_bytes_of_the_file(tmp_path: Path, monkeypatch) -> None:
    """Mapped and never copied: a look-up unpacks each row that it needs once, and the results are equal."""
    folder = folder_of(tmp_path, **ENGRAM)
    device, host = (load_pretrained(folder, packed=True, runtime=runtime) for runtime in (None, HOST))
    ours, theirs = (built.layers[1].engram.embed.weight for built in (host, device))
    assert ours.on_host and not theirs.on_host and held_bytes(ours) == 0 < held_bytes(theirs)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert torch.equal(ours.values(), theirs.values())
    moved = ours.to("meta", torch.bfloat16)
    assert moved.on_host and moved.device.type == "cpu" and moved.codes is ours.codes
    raw = (folder / "model.safetensors").read_bytes()
    assert bytes(ours.codes.view(torch.uint8).flatten().numpy()) in raw
    read: list[int] = []

    def watched(codes: Tensor, scale: Tensor, packing: Packing) -> Tensor:
        read.append(len(codes) if packing == FP8_ROWS else 0)
        return unpack(codes, scale, packing)

    monkeypatch.setattr(model.packed, "unpack", watched)
    ids = tokens(2, 40)
    with torch.no_grad():
        assert torch.equal(host(ids).logits, device(ids).logits)
    found = host.layers[1].engram.embed.look_up(torch.tensor([[3, 9], [9, 3]]))
    assert len(found.values) == 2 and torch.equal(found.rows(), theirs.values()[torch.tensor([[3, 9], [9, 3]])])
    monkeypatch.undo()
    for ours, theirs in zip(trained_below(host), trained_below(device), strict=True):
        assert torch.equal(ours, theirs)
    save_pretrained(host, tmp_path / "again", format="released")
    assert (tmp_path / "again/model.safetensors").read_bytes() == raw


def test_tables_that_are_not_packed_cannot_stay_on_the_host(tmp_path: Path) -> None:
    save_pretrained(tiny_model(**ENGRAM), tmp_path / "plain", WORDS)
    with pytest.raises(ValueError, match="runtime.tables: 'host' needs a quantised checkpoint"):
        load_pretrained(tmp_path / "plain", packed=True, runtime=HOST)
    with pytest.raises(ValueError, match="runtime.tables: 'host' needs runtime.frozen=packed"):
        ForwardOptions(tables="host", frozen="values")


def spread(rank: int, folder: str) -> list[Tensor]:
    """Logits of packed and plain weights, and with tables on the host, whose experts and tables are split over two
    processes.
    """
    split, ids = ranks_of(2), tokens(2, 40)
    ways = ((True, None), (False, None), (True, HOST))
    parallel = Parallel(experts=split, tables=split)
    built = [load_pretrained(folder, packed=keep, runtime=runtime, parallel=parallel) for keep, runtime in ways]
    table = built[2].layers[1].engram.embed.weight
    assert table.on_host and len(table.codes) == len(table) == built[2].layers[1].engram.embed.shard.height
    with torch.no_grad():
        return [one(ids).logits for one in built]


@pytest.mark.slow
@pytest.mark.distributed
def test_split_over_processes(tmp_path: Path) -> None:
    for packed, plain, host in processes.run(2, spread, str(folder_of(tmp_path, **ENGRAM))):
        assert torch.equal(packed, plain) and torch.equal(packed, host)
