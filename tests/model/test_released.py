"""The quantised checkpoint: bytes by hand, the rule against a slow reference, exact round trips, refusals by name."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import golden
from safetensors.torch import load_file, save_file
from tiny import tiny_model

import model.checkpoint.released
from model import convert_checkpoint, load_pretrained, load_weights, save_pretrained
from model.checkpoint.names import SCALES
from model.checkpoint.released import INDEX, QUANTIZATION, SINGLE, is_quantised, packing_of
from model.quantize import FP4_ROWS, FP8_ROWS, FP8_TILES, pack, unpack

E8M0 = torch.float8_e8m0fnu
KINDS = {"tiles": FP8_TILES, "rows": FP8_ROWS, "fp4": FP4_ROWS}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def hex_of(tensor: torch.Tensor) -> str:
    return bytes(raw(tensor).flatten().tolist()).hex()


def e4m3(byte: int) -> float:
    """What an E4M3 byte means, from the definition of the format."""
    sign, exponent, mantissa = (-1.0 if byte & 128 else 1.0), byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


class Slow:
    """The storage format entry by entry, from its definition and without the implementation."""

    def __init__(self, kind: str):
        self.kind = kind
        values = E2M1 if kind == "fp4" else [e4m3(b) for b in range(256)]
        self.values = np.array(values)
        self.largest, self.floor = (6.0, 6 * 2.0**-126) if kind == "fp4" else (448.0, 1e-4)
        self.tile_rows = 32 if kind == "tiles" else 1

    def decode(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Code bytes and scale bytes -> float64."""
        if self.kind == "fp4":
            wide = np.empty((codes.shape[0], 2 * codes.shape[1]), np.uint8)
            wide[:, 0::2], wide[:, 1::2] = codes % 16, codes // 16
            codes = wide
        down = np.repeat(2.0 ** (scale.astype(float) - 127), self.tile_rows, 0)[: codes.shape[0]]
        return self.values[codes] * np.repeat(down, 32, 1)[:, : codes.shape[1]]

    def encode(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64 -> code bytes, scale bytes: nearest value, ties to the even code; 2^ceil(log2(amax/largest))."""
        rows, columns = matrix.shape
        codes = np.zeros((rows, columns), np.uint8)
        scale = np.zeros((-(-rows // self.tile_rows), -(-columns // 32)), np.uint8)
        half = len(self.values) // 2
        magnitudes = self.values[:half][~np.isnan(self.values[:half])]
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                where = np.s_[i * self.tile_rows : (i + 1) * self.tile_rows, j * 32 : (j + 1) * 32]
                tile = matrix[where]
                mantissa, exponent = math.frexp(max(np.abs(tile).max(), self.floor) / self.largest)
                exponent -= mantissa == 0.5  # an exact power of two
                scale[i, j] = exponent + 127
                x = np.abs(tile) / 2.0**exponent
                above = np.searchsorted(magnitudes, x).clip(0, len(magnitudes) - 1)
                below = (above - 1).clip(0)
                up, down = magnitudes[above] - x, x - magnitudes[below]
                code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
                codes[where] = code + half * np.signbit(tile)
        if self.kind == "fp4":
            codes = codes[:, 0::2] + 16 * codes[:, 1::2]
        return codes, scale


def test_fp8_bytes_by_hand() -> None:
    """Two tiles across, two down, the right and lower ones partial."""
    matrix = torch.zeros(33, 36)
    matrix[0, :6] = torch.tensor([448.0, 1, -1, -0.0, 2.0**-9, 240])
    matrix[0, 32:36] = torch.tensor([449.0, 448, -2, 225])  # scale 2: 224.5 is nearest 224; 112.5 nearest 112
    codes, scale = pack(matrix, FP8_TILES)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == E8M0
    assert hex_of(codes[0, :7]) == "7e38b880017700" and hex_of(codes[0, 32:]) == "7676b86e"
    assert hex_of(codes[1:]) == "00" * 32 * 36
    assert hex_of(scale) == "7f80" + "6969"  # 2^0, 2^1; nothing but zeros: 2^-22 from amax 1e-4
    assert unpack(codes, scale, FP8_TILES)[0, 32:].tolist() == [448, 448, -2, 224]
    row, scales = pack(matrix[:1], FP8_ROWS)
    assert hex_of(row) == hex_of(codes[0]) and hex_of(scales) == "7f80"


def test_fp4_bytes_by_hand() -> None:
    matrix = torch.zeros(2, 34)
    matrix[0, :16] = torch.tensor(E2M1)
    matrix[0, 16:22] = torch.tensor([0.25, 0.75, 2.5, 3.5, 5.0, -5.5])  # ties to even: 0, 1, 2, 4, 4; and -6
    matrix[0, 32:] = torch.tensor([7.0, -0.2])  # scale 2: 3.5 -> 4, -0.1 -> -0
    codes, scale = pack(matrix, FP4_ROWS)
    assert codes.dtype == torch.int8 and codes.shape == (2, 17) and scale.dtype == E8M0
    # the even column is the low nibble: 0 and .5 make 0x10
    assert hex_of(codes[0]) == "1032547698badcfe" + "2064f6" + "00" * 5 + "86"
    assert hex_of(scale) == "7f80" + "0101"  # zeros: 2^-126
    assert unpack(codes, scale, FP4_ROWS)[0, 14:22].tolist() == [-4, -6, 0, 1, 2, 4, 4, -6]
    with pytest.raises(ValueError, match="33 columns"):
        FP4_ROWS.codes_shape(2, 33)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_the_slow_reference(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(70, 102, generator=generator) * torch.randn(70, 1, generator=generator).mul(6).exp()
    matrix[32:64, :32] = 0
    matrix[5, 5], matrix[6, 6] = -0.0, 448 * 2.0**9
    edges = torch.tensor([1.0, 3, 5, 7, 9, 225, 449, 3.4, 7e-5, -1e-30])
    matrix[40:45, 40:50] = edges * 2.0 ** torch.arange(5)[:, None]
    for x in (matrix, matrix.bfloat16()):
        codes, scale = pack(x, KINDS[kind])
        wanted_codes, wanted_scale = Slow(kind).encode(x.double().numpy())
        assert np.array_equal(raw(scale).numpy(), wanted_scale)
        assert np.array_equal(raw(codes).numpy(), wanted_codes)
        assert np.array_equal(unpack(codes, scale, KINDS[kind]).numpy(), Slow(kind).decode(wanted_codes, wanted_scale))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_under_every_scale_comes_back(kind: str) -> None:
    """With its scales kept a weight has its bytes again, whatever rule made them; without, its values."""
    codes = torch.arange(256, dtype=torch.uint8)
    if kind != "fp4":
        codes[codes & 127 == 127] = 0  # NaN
    for low in range(2, 246, 4):  # 448 * 2^(246 - 127) is the last power that fp32 holds
        scale = torch.arange(low, low + 4, dtype=torch.uint8).repeat_interleave(8 // (1 + (kind == "fp4")) * 8)
        scale = scale[:8].reshape(1, 8) if kind != "fp4" else scale[:16].reshape(1, 16)
        row = codes.view(1, 256).view(KINDS[kind].codes)
        values = unpack(row, scale.view(E8M0), KINDS[kind])
        again, kept = pack(values, KINDS[kind], scale.view(E8M0))
        assert torch.equal(raw(again), raw(row)) and torch.equal(raw(kept), scale)
        if low > 110:  # below, the floor of the rule rounds to zero
            assert torch.equal(unpack(*pack(values, KINDS[kind]), KINDS[kind]), values)


def test_shrunk_amax_needs_the_kept_scale() -> None:
    """225 rounds to 224, just half of the range: the rule alone then finds half the scale for the same value."""
    codes, scale = pack(torch.full((32, 32), 225.0), FP8_TILES)
    values = unpack(codes, scale, FP8_TILES)
    assert hex_of(codes[0, :1]) == "76" and hex_of(scale) == "7f" and values[0, 0] == 224
    moved, half = pack(values, FP8_TILES)
    assert hex_of(moved[0, :1]) == "7e" and hex_of(half) == "7e" and torch.equal(unpack(moved, half, FP8_TILES), values)
    again, kept = pack(values, FP8_TILES, scale)
    assert torch.equal(raw(again), raw(codes)) and torch.equal(raw(kept), raw(scale))


def test_a_changed_tile_follows_the_rule_and_its_neighbours_stay() -> None:
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    scale = torch.full((2, 2), 140, dtype=torch.uint8).view(E8M0)  # far from what the rule finds
    codes = (matrix * 2.0**-5).to(torch.float8_e4m3fn)
    values = unpack(codes, scale, FP8_TILES)
    values[40, 3] += 1e-3
    changed, scales = pack(values, FP8_TILES, scale)
    fresh, fresh_scale = pack(values, FP8_TILES)
    assert raw(scales).tolist() == [[140, 140], [raw(fresh_scale)[1, 0], 140]] and raw(fresh_scale)[1, 0] != 140
    assert torch.equal(raw(changed)[32:, :32], raw(fresh)[32:, :32])
    assert torch.equal(raw(changed)[:32], raw(codes)[:32]) and torch.equal(raw(changed)[32:, 32:], raw(codes)[32:, 32:])


def kind_of(name: str) -> str | None:
    """The released layout in words, written without the implementation's table."""
    leaf = name.removesuffix(".weight").split(".", 2)[-1]
    if not name.startswith(("layers.", "mtp.")) or not name.endswith(".weight"):
        return None
    if leaf.startswith("ffn.experts."):
        return "fp4"
    if leaf == "engram.embed":
        return "rows"
    dense = "attn.wq_a attn.wq_b attn.wkv attn.wo_a attn.wo_b attn.indexer.wq_b engram.wkv main_proj".split()
    return "tiles" if leaf in dense or leaf.startswith("ffn.shared_experts.w") else None


def released_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with arbitrary codes and scales, made by hand from the golden model's names, with a drafter."""
    rng = np.random.default_rng(0)
    shutil.copytree(golden("vision"), folder)
    tensors = {}
    plain = load_file(folder / SINGLE)
    drafter = ("ffn.experts.0.w2", "attn.wkv", "hc_attn_scale", "attn_norm")
    plain |= {f"mtp.0.{k}.weight".replace("scale.weight", "scale"): torch.randn(64, 64).bfloat16() for k in drafter}
    plain["mtp.0.main_proj.weight"] = torch.zeros(64, 192)
    for name, tensor in plain.items():
        kind = kind_of(name)
        if kind is None:
            keep = tensor.dim() < 2 or "hc_" in name or "compressor" in name
            tensors[name] = tensor if keep else tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        codes = rng.integers(0, 256, (rows, columns // 2 if kind == "fp4" else columns), dtype=np.uint8)
        if kind != "fp4":
            codes[codes & 127 == 127] = 0x80
        scale = rng.integers(110, 126, (-(-rows // 32) if kind == "tiles" else rows, -(-columns // 32)), dtype=np.uint8)
        codes[:32, :16] = 0  # a tile of zeros, and one of negative zeros
        codes[:32, 32:48] = 0x88 if kind == "fp4" else 0x80
        tensors[name] = torch.from_numpy(codes).view(torch.int8 if kind == "fp4" else torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "scale"] = torch.from_numpy(scale).view(E8M0)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**QUANTIZATION, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == t.dtype and ours[k].shape == t.shape and torch.equal(raw(ours[k]), raw(t))
        for k, t in theirs.items()
    )


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("released") / "m"
    return folder, released_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("through_plain", [False, True])
def test_released_to_ours_to_released_is_byte_identical(tmp_path, released, dtype, through_plain) -> None:
    folder, tensors = released
    loaded = load_pretrained(folder, dtype=dtype)
    state = loaded.state_dict()
    for ours, name in (("layers.0.attn.wkv.weight", "layers.0.attn.wkv"), ("layers.1.ffn.experts.w2", None)):
        for expert, value in enumerate(state[ours] if name is None else [state[ours]]):
            stem = name or f"layers.1.ffn.experts.{expert}.w2"
            codes, scale = (raw(tensors[f"{stem}.{part}"]).numpy() for part in ("weight", "scale"))
            wanted = Slow(kind_of(f"{stem}.weight")).decode(codes, scale)
            assert np.array_equal(value.double().numpy(), wanted), stem
    if through_plain:
        save_pretrained(loaded, tmp_path / "plain")
        assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
        shutil.copy(folder / "tokenizer.json", tmp_path / "plain")
        loaded = load_pretrained(tmp_path / "plain", dtype=dtype)
    save_pretrained(loaded, tmp_path / "out", format="released", shard_bytes=200_000)
    out = all_tensors(tmp_path / "out")
    quantised = [name for name, t in tensors.items() if t.dtype.itemsize == 1 and not name.startswith("mtp.")]
    assert len(quantised) > 100 and all(torch.equal(raw(out[name]), raw(tensors[name])) for name in quantised)
    assert out.keys() == {name for name in tensors if not name.startswith("mtp.")}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["fmt"] == "e4m3"
    where = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert len(set(where.values())) > 2 and where.keys() == out.keys()
    assert all(where[k.removesuffix("scale") + "weight"] == file for k, file in where.items() if k.endswith(".scale"))


def test_only_touched_tiles_change(tmp_path, released) -> None:
    folder, tensors = released
    loaded = load_pretrained(folder)
    with torch.no_grad():
        loaded.layers[1].ffn.experts.w1[2, 5, 3] += 1e-4
    save_pretrained(loaded, tmp_path / "out", format="released")
    out = load_file(tmp_path / "out" / SINGLE)
    changed = {name for name, t in out.items() if t.dtype.itemsize == 1 and not torch.equal(raw(t), raw(tensors[name]))}
    assert changed <= {"layers.1.ffn.experts.2.w1.weight", "layers.1.ffn.experts.2.w1.scale"} and changed
    for name in changed:
        rows = (raw(out[name]) != raw(tensors[name])).any(1)
        assert rows.nonzero().flatten().tolist() == [5]


def test_conversion_there_and_back_is_byte_identical_with_everything(tmp_path, released) -> None:
    folder, tensors = released
    total = convert_checkpoint(folder, tmp_path / "bf16", "bf16", shard_bytes=300_000).nbytes
    plain = all_tensors(tmp_path / "bf16")
    assert total == sum(t.nbytes for t in plain.values()) and (tmp_path / "bf16" / INDEX).exists()
    assert {t.dtype for t in plain.values()} == {torch.bfloat16, torch.float32}
    assert plain["mtp.0.ffn.experts.0.w2.weight"].shape == (64, 64)
    assert plain["layers.0.attn.wo_a.weight"].dtype == torch.bfloat16
    bf16, direct = load_pretrained(tmp_path / "bf16"), load_pretrained(folder)
    assert all(torch.equal(t, direct.state_dict()[k]) for k, t in bf16.state_dict().items())
    convert_checkpoint(tmp_path / "bf16", tmp_path / "back", "released")
    assert same_tensors(load_file(tmp_path / "back" / SINGLE), tensors)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    convert_checkpoint(folder, tmp_path / "copy", "released")
    assert same_tensors(load_file(tmp_path / "copy" / SINGLE), tensors)
    (tmp_path / "bf16" / SCALES).unlink()  # without the kept scales: the same values
    convert_checkpoint(tmp_path / "bf16", tmp_path / "fresh", "released")
    fresh = load_pretrained(tmp_path / "fresh").state_dict()
    assert all(torch.equal(t, direct.state_dict()[k]) for k, t in fresh.items())
    with pytest.raises(ValueError, match="already exists"):
        convert_checkpoint(folder, tmp_path / "copy", "bf16")


def test_a_plain_folder_becomes_bf16_though_it_was_quantised_once(tmp_path, released) -> None:
    """A fine-tuned fp32 export still has the scales of what training did not touch."""
    folder, tensors = released
    save_pretrained(load_pretrained(folder), tmp_path / "export")
    convert_checkpoint(tmp_path / "export", tmp_path / "bf16", "bf16")
    stored = load_file(tmp_path / "bf16" / SINGLE)
    assert {t.dtype for name, t in stored.items() if t.dim() > 1 and ".hc_" not in name} == {torch.bfloat16}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    convert_checkpoint(tmp_path / "bf16", tmp_path / "back", "released")
    back = load_file(tmp_path / "back" / SINGLE)
    quantised = [name for name, t in tensors.items() if t.dtype.itemsize == 1 and not name.startswith("mtp.")]
    assert quantised and all(torch.equal(raw(back[name]), raw(tensors[name])) for name in quantised)


def test_plain_to_released_is_the_slow_reference(tmp_path) -> None:
    """From our own bf16 folder; quantised by kind, the rest as it was."""
    save_pretrained(tiny_model(vision=True), tmp_path / "plain", dtype=torch.bfloat16)
    convert_checkpoint(tmp_path / "plain", tmp_path / "out", "released")
    plain, out = load_file(tmp_path / "plain" / SINGLE), load_file(tmp_path / "out" / SINGLE)
    assert not (tmp_path / "plain" / SCALES).exists()
    for name, tensor in plain.items():
        kind = kind_of(name)
        assert (packing_of(name) is None) == (kind is None)
        if kind is None:
            assert torch.equal(raw(out.pop(name)), raw(tensor))
            continue
        codes, scale = Slow(kind).encode(tensor.double().numpy())
        assert np.array_equal(raw(out.pop(name)).numpy(), codes), name
        assert np.array_equal(raw(out.pop(name.removesuffix("weight") + "scale")).numpy(), scale), name
    assert not out


def test_blocks_do_not_show_and_no_tensor_is_held_whole(tmp_path, released, monkeypatch) -> None:
    """Files are the same whether tensors go whole or 32 rows at a time; only scales are ever read in one piece."""
    folder, _ = released
    convert_checkpoint(folder, tmp_path / "whole", "bf16")
    read, pieces = model.checkpoint.released.Shards.read, []

    def watched(self, name, rows=None):
        if not name.endswith(".scale"):
            pieces.append(rows.stop - rows.start)
        return read(self, name, rows)

    monkeypatch.setattr(model.checkpoint.released.Shards, "read", watched)
    monkeypatch.setattr(model.checkpoint.released, "BLOCK", 1)
    convert_checkpoint(folder, tmp_path / "blocks", "bf16")
    assert max(pieces) == 32 and min(pieces) < 32
    assert (tmp_path / "whole" / SINGLE).read_bytes() == (tmp_path / "blocks" / SINGLE).read_bytes()
    save_pretrained(load_pretrained(folder), tmp_path / "a", format="released")
    monkeypatch.undo()
    save_pretrained(load_pretrained(folder), tmp_path / "b", format="released")
    assert (tmp_path / "a" / SINGLE).read_bytes() == (tmp_path / "b" / SINGLE).read_bytes()


def bad_nan(t: dict) -> None:
    raw(t["layers.1.attn.wkv.weight"])[3, 3] = 0x7F


def bad_scale(t: dict) -> None:
    raw(t["layers.1.attn.wkv.scale"])[0, 0] = 0xFF


W = "layers.0.attn.wq_b"
REFUSED = [
    (lambda t: t.pop("layers.2.ffn.experts.3.w1.weight"), "missing: layers.2.ffn.experts.3.w1.weight"),
    (lambda t: t.pop(f"{W}.scale"), f"missing: {W}.scale"),
    (
        lambda t: t.update({"layers.0.attn.wx.scale": t[f"{W}.scale"].clone()}),
        "scale without weight: layers.0.attn.wx.scale",
    ),
    (lambda t: t.update({"norm.scale": t[f"{W}.scale"].clone()}), "extra: norm.scale"),
    (lambda t: t.update({"extra": torch.zeros(1)}), "extra: extra"),
    (lambda t: t.update({f"{W}.weight": t[f"{W}.weight"][1:]}), rf"shape: {W}.weight is \["),
    (lambda t: t.update({f"{W}.scale": t[f"{W}.scale"][:, :-1].contiguous()}), rf"shape: {W}.scale is \["),
    (lambda t: t.update({f"{W}.scale": t[f"{W}.scale"].float()}), f"type: {W}.scale is F32, must be F8_E8M0"),
    (lambda t: t.update({f"{W}.weight": t[f"{W}.weight"].bfloat16()}), f"type: {W}.weight is BF16, must be F8_E4M3"),
    (lambda t: t.update({f"{W}.weight": raw(t[f"{W}.weight"])}), f"type: {W}.weight is U8, must be F8_E4M3"),
    (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)}), "type: norm.weight is F8_E4M3"),
    (lambda t: t.pop("mtp.0.attn.wkv.weight"), "scale without weight: mtp.0.attn.wkv.scale"),
    (lambda t: t.pop("mtp.0.attn.wkv.scale"), "missing: mtp.0.attn.wkv.scale"),
    (bad_nan, "layers.1.attn.wkv.weight with layers.1.attn.wkv.scale has a NaN"),
    (bad_scale, "layers.1.attn.wkv.weight with layers.1.attn.wkv.scale has a NaN"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, released, change, message) -> None:
    folder, tensors = released
    shutil.copytree(folder, tmp_path / "m")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, tmp_path / "m" / SINGLE)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "m", tmp_path / "out", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_config_and_weights_must_agree(tmp_path, released) -> None:
    folder, _ = released
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="wkv.weight is F8_E4M3, must be F32, BF16 or F16 .config.json has no quantiz"):
        load_pretrained(tmp_path / "m")
    config["quantization_config"] = {**quantization, "weight_block_size": [128, 128], "scale_fmt": "fp32"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        load_pretrained(tmp_path / "m")
    expected = ("config.json", "weight_block_size: is [128, 128], must be [32, 32]", "scale_fmt: is 'fp32', must be")
    assert all(text in str(error.value) for text in expected)
    assert is_quantised({"quantization_config": quantization}) and not is_quantised({})


def test_no_pickle_and_no_damaged_file_is_read(tmp_path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "sprung").touch, ())

    save_pretrained(tiny_model(), tmp_path / "m", shard_bytes=20_000)
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    whole, index = shard.read_bytes(), (tmp_path / "m" / INDEX).read_text()
    for damaged in (whole[:-1], whole[:4], b"", pickle.dumps(Trap())):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{shard.name} is not a complete safetensors file"):
            load_pretrained(tmp_path / "m")
    shard.write_bytes(whole)
    for text in ("{", "[]", '{"weight_map": {}}', index.replace(shard.name, "../elsewhere.safetensors")):
        (tmp_path / "m" / INDEX).write_text(text)
        with pytest.raises(ValueError, match=f"{INDEX} is damaged"):
            load_pretrained(tmp_path / "m")
    (tmp_path / "m" / INDEX).write_text(index)
    tensors = load_file(shard)
    save_file({**tensors, "stray": torch.zeros(1)}, shard)
    with pytest.raises(ValueError, match="stray, which .* does not list"):
        load_pretrained(tmp_path / "m")
    name = next(iter(load_file(sorted((tmp_path / "m").glob("*.safetensors"))[0])))
    save_file({**tensors, name: torch.zeros(1)}, shard)
    with pytest.raises(ValueError, match=f"{name} is in both"):
        load_pretrained(tmp_path / "m")
    for file in (tmp_path / "m").glob("model*"):
        file.unlink()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(FileNotFoundError, match="weights in other formats cannot be read"):
        load_pretrained(tmp_path / "m")
    assert not (tmp_path / "sprung").exists()


def test_kept_scales_are_checked(tmp_path, released) -> None:
    folder, _ = released
    convert_checkpoint(folder, tmp_path / "m", "bf16")
    scales = load_file(tmp_path / "m" / SCALES)
    for change, message in (
        ({f"{W}.scale": scales[f"{W}.scale"][1:]}, rf"{W}.scale in {SCALES} is F8_E8M0 \["),
        ({"norm.scale": scales[f"{W}.scale"]}, f"scale without weight: norm.scale in {SCALES}"),
    ):
        save_file({**scales, **{k: t.contiguous().clone() for k, t in change.items()}}, tmp_path / "m" / SCALES)
        with pytest.raises(ValueError, match=message):
            load_pretrained(tmp_path / "m")
    (tmp_path / "m" / SCALES).write_bytes(b"half")
    with pytest.raises(ValueError, match=f"{SCALES} is not a complete"):
        load_pretrained(tmp_path / "m")


def test_what_cannot_be_quantised_is_named_and_nothing_is_left(tmp_path) -> None:
    built = tiny_model()
    with torch.no_grad():
        built.layers[1].ffn.experts.w3[2, 0, 0] = math.inf
    with pytest.raises(ValueError, match="layers.1.ffn.experts.2.w3.weight has a NaN or infinite value"):
        save_pretrained(built, tmp_path / "m", format="released")
    odd = tiny_model(moe_intermediate_size=15)
    with pytest.raises(ValueError, match="layers.0.ffn.experts.0.w2.weight has 15 columns"):
        save_pretrained(odd, tmp_path / "m", format="released")
    with pytest.raises(ValueError, match="format: 'int4' is unknown"):
        save_pretrained(odd, tmp_path / "m", format="int4")
    assert not list(tmp_path.iterdir())


def test_weights_load_into_a_model_that_exists(released) -> None:
    folder, _ = released
    first, second = load_pretrained(folder), load_pretrained(folder)
    with torch.no_grad():
        second.layers[0].attn.wkv.weight.zero_()
    load_weights(second, folder)
    assert torch.equal(first.layers[0].attn.wkv.weight, second.layers[0].attn.wkv.weight)
    assert second.released_scales.keys() == first.released_scales.keys()


def test_what_is_quantised_by_name() -> None:
    names = ["layers.1.engram.embed.weight", "layers.39.ffn.experts.383.w2.weight", "mtp.2.ffn.experts.127.w1.weight"]
    assert [packing_of(name) for name in names] == [FP8_ROWS, FP4_ROWS, FP4_ROWS]
    assert FP4_ROWS.codes_shape(5120, 2304) == (5120, 1152) and FP4_ROWS.scale_shape(5120, 2304) == (5120, 72)
    plain = "embed.weight layers.2.attn.indexer.wk.weight layers.2.attn.compressor.wkv.weight layers.2.ffn.gate.weight"
    assert not any(packing_of(name) for name in [*plain.split(), "vision.blocks.0.attn.wo.weight", "mtp.0.norm.weight"])
