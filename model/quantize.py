"""Quantisation: fake quantisation of the attention state (rounding in the forward pass, identity in the backward pass),
packed storage of the attention state in a cache (`KV_*`), and packed storage of quantised weights (`pack`, `unpack`;
released.py defines the packing of each weight), which `round_weight` simulates in training.

The attention state uses three formats of the V4.1 report. Rounding changes the selection of the indexer, so training
rounds too. Gradients pass through the rounding unchanged, also for values that were clipped.

  Window KV (FP8): E4M3 values in groups of 32 with a UE8M0 scale.

  Indexer queries and keys (MXFP4): E2M1 values in groups of 32 with a UE8M0 scale.

  Main KV (FP4): E2M1 values in groups of 16 with an E4M3 scale, without a global scale.

Attention state is [..., width], cut into groups of 16 or 32 values along the last axis; weights are [rows, columns].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model.kernels.switch import in_triton
from model.no_wait import Constant

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_SMALLEST = 2.0**-9  # smallest positive E4M3 value (subnormal)


def fake_quant_fp8(x: Tensor) -> Tensor:
    """Round the sliding-window KV to E4M3, in groups of 32 along the last axis with a power-of-two scale. The result
    has the shape and dtype of `x`.
    """
    return _straight_through(x, "fp8", _fp8)


def fake_quant_mxfp4(x: Tensor) -> Tensor:
    """Round indexer queries and keys to E2M1, in groups of 32 along the last axis with a power-of-two scale."""
    return _straight_through(x, "mxfp4", _mxfp4)


def fake_quant_fp4(x: Tensor) -> Tensor:
    """Round the shared main KV, after rotation, to E2M1, in groups of 16 along the last axis with an E4M3 scale."""
    return _straight_through(x, "fp4", _fp4)


def _straight_through(x: Tensor, name: str, rounder: Callable[[Tensor], Tensor]) -> Tensor:
    if in_triton(x):
        from model.kernels import rope as kernels

        return kernels.rotate(x, None, rounding=name)
    return _StraightThrough.apply(x, rounder)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounder) -> Tensor:
        return rounder(x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def _fp8(x: Tensor) -> Tensor:
    return _join(*_fp8_parts(x), x)


def _mxfp4(x: Tensor) -> Tensor:
    return _join(*_mxfp4_parts(x), x)


def _fp4(x: Tensor) -> Tensor:
    return _join(*_fp4_parts(x), x)


def _fp8_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded fp32 values [..., groups, size] and the scales [..., groups, 1] of x in the FP8 format; the other
    `_parts` functions return the values and scales of other formats.
    """
    groups = _groups(x, 32)
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4) / E4M3_MAX)
    return (groups / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float(), scale


def _mxfp4_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = _groups(x, 32)
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_(min=E2M1_MAX * 2.0**-126) / E2M1_MAX)
    return round_e2m1(groups / scale), scale


def _fp4_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = _groups(x, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=E2M1_MAX * E4M3_SMALLEST)
    scale = (amax / E2M1_MAX).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return round_e2m1(groups / scale), scale


def round_e2m1(x: Tensor) -> Tensor:
    """Round every element of an fp32 tensor to the nearest E2M1 value (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives),
    ties to the even mantissa, clipped at 6.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    # E2M1 values are .5 apart below 2, 1 apart below 4, 2 apart above; after division by this spacing, rounding half to
    # even picks the even mantissa
    step = (magnitude >= 2).float().add_(1).add_((magnitude >= 4).float(), alpha=2).mul_(0.5)
    return (x / step).round_().mul_(step)


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two >= x for positive normal fp32 x, computed exactly from the exponent bits."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000  # a nonzero mantissa carries into the exponent
    return exponent.view(torch.float32)


def _groups(x: Tensor, size: int) -> Tensor:
    """Reshape [..., width] to groups [..., ceil(width/size), size]; a partial last group is padded with zeros."""
    if x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
    return x.unflatten(-1, (-1, size))


def _join(values: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """Compute values * scale in place, and join the groups to the shape of `like`."""
    return values.mul_(scale).flatten(-2)[..., : like.shape[-1]].reshape(like.shape)


class KVFormat(NamedTuple):
    """The format of one kind of attention state: a fake quantiser, and a packed storage format that reproduces the fake
    quantiser's values bit for bit. `size` values share a scale. Four-bit codes hold two values a byte, the even channel
    in the low nibble.
    """

    fake_quant: Callable[[Tensor], Tensor]
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]
    size: int
    codes: torch.dtype
    scale: torch.dtype

    def widths(self, width: int) -> tuple[int, int]:
        """The number of code elements and the number of scales that store a row of `width` values."""
        return (-(-width // 2) if self.codes == torch.uint8 else width), -(-width // self.size)

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pack x [N, width], before or after fake quantisation, to (codes, scales)."""
        values, scale = self.parts(x.float())
        values = values.flatten(-2)[..., : x.shape[-1]]
        if self.codes == torch.uint8:
            codes = _join_nibbles(torch.nn.functional.pad(values, (0, x.shape[-1] % 2))).view(torch.uint8)
        else:
            codes = values.to(self.codes)
        return codes, scale.squeeze(-1).to(self.scale)

    def unpack(self, codes: Tensor, scale: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The values [..., width] that the codes and scales of `pack` represent."""
        values = _split_nibbles(codes) if self.codes == torch.uint8 else codes.float()
        scale = scale.float()
        if width % self.size:
            scale = scale.repeat_interleave(self.size, dim=-1)[..., :width]
            return (values[..., :width] * scale).to(dtype)
        values.view(*scale.shape, self.size).mul_(scale.unsqueeze(-1))
        return values.to(dtype)


KV_WINDOW = KVFormat(fake_quant_fp8, _fp8_parts, 32, torch.float8_e4m3fn, torch.float8_e8m0fnu)
KV_INDEX = KVFormat(fake_quant_mxfp4, _mxfp4_parts, 32, torch.uint8, torch.float8_e8m0fnu)
KV_MAIN = KVFormat(fake_quant_fp4, _fp4_parts, 16, torch.uint8, torch.float8_e4m3fn)


def main_kv_format(kv_quant: bool) -> KVFormat | None:
    """The format of the main KV, or None if it is not quantised. Training (fake quantisation), the gather of packed
    entries under context parallelism and the cache (packed storage) call this function, so that they use the same
    format.
    """
    return KV_MAIN if kv_quant else None


@dataclass(frozen=True)
class Packing:
    """The storage format of a quantised matrix: codes of dtype `codes`, and one UE8M0 scale for every tile of
    `tile_rows` x 32 entries.

    float8_e4m3fn codes have the matrix's shape. int8 codes hold two E2M1 values a byte, the even column in the low
    nibble. Tiles at the right and lower edge may be partial.
    """

    codes: torch.dtype
    tile_rows: int

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the codes of a [rows, columns] matrix. Raises ValueError for an odd number of columns of E2M1
        values.
        """
        if self.codes != torch.int8:
            return rows, columns
        if columns % 2:
            raise ValueError(f"has {columns} columns; two E2M1 values share a byte, so the number must be even")
        return rows, columns // 2

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a [rows, columns] matrix, with one scale for each tile."""
        return -(-rows // self.tile_rows), -(-columns // 32)


FP8_TILES = Packing(torch.float8_e4m3fn, 32)
FP8_ROWS = Packing(torch.float8_e4m3fn, 1)
FP4_ROWS = Packing(torch.int8, 1)


def pack(matrix: Tensor, packing: Packing, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise a [rows, columns] matrix of finite values; returns (codes, scales float8_e8m0fnu).

    The scale of a tile is the smallest power of two with amax / scale <= 448 (E4M3) or 6 (E2M1), where amax, the
    largest absolute value of the tile, is raised to at least 1e-4 (E4M3) or 6 * 2^-126 (E2M1), as in the fake
    quantisers above. `kept`: the scales with which the matrix was stored before. A tile that its old scale represents
    exactly keeps its old scale, so that unchanged weights are written with unchanged bytes. Without `kept`, unchanged
    values could get another scale: if rounding has lowered amax to half of the range, the smallest power of two is half
    of the old scale; and the old scale may come from a different rule.
    """
    tiles = _tiles(matrix.float(), packing.tile_rows)
    scale = _tile_scale(tiles, packing)
    if kept is not None:
        kept = kept.float()[:, None, :, None]
        lossless = (_round(tiles / kept, packing) * kept == tiles).all(1, keepdim=True).all(3, keepdim=True)
        scale = torch.where(lossless, kept, scale)
    rounded = _matrix(_round(tiles / scale, packing), *matrix.shape)
    codes = _join_nibbles(rounded) if packing.codes == torch.int8 else rounded.to(torch.float8_e4m3fn)
    return codes, scale[:, 0, :, 0].to(torch.float8_e8m0fnu)


def unpack(codes: Tensor, scale: Tensor, packing: Packing) -> Tensor:
    """The fp32 matrix [rows, columns] that codes and scales represent. The fp32 values are exact, because codes have at
    most four significant bits and scales are powers of two.
    """
    values = _split_nibbles(codes) if packing.codes == torch.int8 else codes.float()
    return _matrix(_tiles(values, packing.tile_rows) * scale.float()[:, None, :, None], *values.shape)


def round_weight(weight: Tensor, packing: Packing) -> Tensor:
    """Round a weight [..., rows, columns] to the values that it has after `pack` and `unpack`, so that training uses
    the weights of the quantised checkpoint. The gradient is the identity, also for values that were clipped. The result
    has the shape and dtype of `weight`.

    In a stack of weights, every weight is rounded on its own; a stack therefore needs a packing with tiles one row
    high.
    """
    if weight.dim() > 2 and packing.tile_rows > 1:
        raise ValueError(f"a stack {list(weight.shape)} of weights cannot be rounded in tiles of several rows")
    return _StraightThrough.apply(weight, partial(_rounded, packing=packing))


def _rounded(weight: Tensor, packing: Packing) -> Tensor:
    matrix = weight.flatten(0, -2)
    tiles = _tiles(matrix, packing.tile_rows)
    scale = _tile_scale(tiles, packing)
    return _matrix(_round(tiles / scale, packing).mul_(scale), *matrix.shape).reshape(weight.shape)


def _tile_scale(tiles: Tensor, packing: Packing) -> Tensor:
    """The scales [tiles down, 1, tiles across, 1] of fp32 tiles, by the rule of `pack`."""
    limit, floor = (E2M1_MAX, E2M1_MAX * 2.0**-126) if packing.codes == torch.int8 else (E4M3_MAX, 1e-4)
    return _power_of_two_above(tiles.abs().amax((1, 3), keepdim=True).clamp_(min=floor) / limit)


def _matrix(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `_tiles`: joins tiles to a [rows, columns] matrix, without the padding."""
    return tiles.flatten(2).flatten(0, 1)[:rows, :columns]


def _tiles(matrix: Tensor, tile_rows: int) -> Tensor:
    """Reshape [rows, columns] to [tiles down, tile_rows, tiles across, 32]; partial tiles are padded with zeros."""
    rows, columns = matrix.shape
    matrix = torch.nn.functional.pad(matrix, (0, -columns % 32, 0, -rows % tile_rows))
    return matrix.unflatten(1, (-1, 32)).unflatten(0, (-1, tile_rows))


def _round(x: Tensor, packing: Packing) -> Tensor:
    """The nearest values that the codes can represent, in fp32; zeros keep their signs."""
    if packing.codes == torch.int8:
        return round_e2m1(x)
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_STEPS = Constant(_LEVELS[1:], torch.float32)
# The value of each nibble, and the two values of each byte. Decoding does one table look-up per byte, because it reads
# many bytes.
_NIBBLES = (*_LEVELS, *(-level for level in _LEVELS))
_PAIRS = Constant([(_NIBBLES[byte & 15], _NIBBLES[byte >> 4]) for byte in range(256)], torch.float32)


def _join_nibbles(x: Tensor) -> Tensor:
    """Pack E2M1 values fp32 [rows, columns] to int8 [rows, columns / 2]; a nibble consists of a sign bit, two exponent
    bits and a mantissa bit.
    """
    steps = _STEPS.on_device_of(x)
    nibble = torch.bucketize(x.abs(), steps, right=True, out_int32=True) + 8 * torch.signbit(x).int()
    return (nibble[:, 0::2] + 16 * nibble[:, 1::2]).to(torch.uint8).view(torch.int8)


def _split_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `_join_nibbles`: unpacks [..., columns / 2] to fp32 [..., columns]."""
    bytes = codes.contiguous().view(torch.uint8).flatten()
    values = _PAIRS.on_device_of(codes).index_select(0, bytes.int())
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])
