"""The vision tower and the aligner, which turn image patches into features of the hidden size of the text backbone.

In shapes, P is the number of patches of one image, h x w its patch grid, c the width of the vision tower, d the hidden
size of the text backbone and s the downsample ratio.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import VisionConfig
from model.norm import RMSNorm

NORM_EPS = 1.0e-6
START, IMAGE, NEWLINE, END = 0, 1, 2, 3  # values of vision_token_types; -1 is text


class VisionAttention(nn.Module):
    """Full attention between the patches of one image, with biases and two-dimensional RoPE."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend within each image: x [images, P, c], RoPE angles fp32 [P, head/2]."""
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = _rotate_halves(q, angles), _rotate_halves(k, angles)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    """A SwiGLU MLP, in which w1 computes the gate and the up projection in one matrix product."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Linear embedding of image patches [3, p, p], which are flattened first."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.proj = nn.Linear(3 * config.patch_size**2, config.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.flatten(-3).to(self.proj.weight.dtype))


class VisionTower(nn.Module):
    """The vision tower: it turns the patches of a batch of images into features, concatenated over images, after
    pixel-unshuffle.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, NORM_EPS)

    def forward(self, pixel_values: Tensor, grids: Tensor) -> Tensor:
        """Compute the features [sum ceil(h/s)*ceil(w/s), s*s*c] of pixel_values [sum P, 3, p, p], for images with patch
        grids `grids` int64 [images, 2] (h, w).

        Images with the same grid are processed as one batch, and patches attend only to patches of the same image.
        Raises ValueError if the number of patches does not match the grids.
        """
        sizes = [(int(h), int(w)) for h, w in grids.tolist()]
        counts = [h * w for h, w in sizes]
        if sum(counts) != pixel_values.shape[0]:
            raise ValueError(
                f"image_grid_hws {sizes} need {sum(counts)} patches, but pixel_values has {pixel_values.shape[0]}"
            )
        patches = self.patch_embed(pixel_values).split(counts)
        features: list[Tensor] = [patches[0]] * len(sizes)
        for size in dict.fromkeys(sizes):
            members = [i for i, other in enumerate(sizes) if other == size]
            x = torch.stack([patches[i] for i in members])
            angles = _angles(size, self.config, x.device)
            for block in self.blocks:
                x = block(x, angles)
            for i, image in zip(members, _unshuffle(self.norm(x), size, self.config.downsample_ratio), strict=True):
                features[i] = image
        return torch.cat(features)

    def feature_counts(self, grids: Tensor) -> list[int]:
        """The number of features of each image; grids as in `forward`."""
        s = self.config.downsample_ratio
        return [-(-h // s) * -(-w // s) for h, w in grids.tolist()]

    def images_at(self, pixel_values: Tensor, grids: Tensor, begin: int, count: int) -> tuple[Tensor, Tensor, int]:
        """Select the images that contribute to the features [begin, begin + count) of all images (arguments as in
        `forward`). Returns the patches and the grids of the selected images, and the number of their features before
        `begin`.
        """
        ends = list(accumulate(self.feature_counts(grids)))
        first, last = bisect_right(ends, begin), bisect_left(ends, begin + count)
        images = slice(first, last + 1 if count else first)
        patches = [0, *accumulate(grids.prod(1).tolist())]
        skipped = begin - (ends[first - 1] if first else 0)
        return pixel_values[patches[first] : patches[len(ends[: images.stop])]], grids[images], skipped


class Aligner(nn.Module):
    """A two-layer MLP that maps the features of the vision tower to the hidden size of the text backbone."""

    def __init__(self, config: VisionConfig, hidden_size: int):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size * config.downsample_ratio**2, hidden_size)
        self.w2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


def _angles(size: tuple[int, int], config: VisionConfig, device: torch.device) -> Tensor:
    """The RoPE angles of a patch grid, fp32 [h*w, head/2]: the first half encodes the row, the second half the
    column.
    """
    quarter = config.hidden_size // config.num_attention_heads // 4
    inv_freq = config.rope_theta ** -(torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    h, w = size
    rows = torch.arange(h, device=device).repeat_interleave(w)
    columns = torch.arange(w, device=device).repeat(h)
    return torch.cat([rows[:, None] * inv_freq, columns[:, None] * inv_freq], dim=1)


def _rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Apply RoPE to x [images, P, heads, head dim]; channels i and i + head/2 are rotated as a pair."""
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _unshuffle(x: Tensor, size: tuple[int, int], s: int) -> Tensor:
    """Pixel-unshuffle: turn [images, h*w, c] into [images, ceil(h/s)*ceil(w/s), s*s*c]; the grid is padded with zeros
    on the right and at the bottom.
    """
    h, w = size
    grid = F.pad(x.unflatten(1, (h, w)).permute(0, 3, 1, 2), (0, -w % s, 0, -h % s))
    return F.pixel_unshuffle(grid, s).flatten(2).transpose(1, 2)
