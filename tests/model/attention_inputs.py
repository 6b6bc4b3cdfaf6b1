"""Random inputs of attention over a window and selected entries."""

from __future__ import annotations

import torch
from torch import Tensor


def inputs(tokens, heads, dim, window, entries, selected, documents=1, seed=0) -> dict:
    """Random attention inputs; every query gets some of `entries` at random, in any order, the rest -1."""
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(tokens - 1, generator=g)[: documents - 1].sort().values + 1 if documents > 1 else []
    start = torch.zeros(tokens, dtype=torch.int64)
    for cut in cuts:
        start[cut:] = cut
    index = torch.arange(tokens)
    topk_indices = None
    if entries:
        topk_indices = torch.stack([torch.randperm(max(entries, selected), generator=g)[:selected] for _ in index])
        drop = torch.rand(topk_indices.shape, generator=g) < 0.3
        topk_indices[drop | (topk_indices >= entries)] = -1
        topk_indices[0] = -1  # a query that sees none
        topk_indices = topk_indices.to(torch.int32)
    return {
        "q": torch.randn(tokens, heads, dim, generator=g).requires_grad_(),
        "window_kv": torch.randn(tokens, dim, generator=g).requires_grad_(),
        "window_start": torch.maximum(start, index - (window - 1)),
        "entries": torch.randn(entries, dim, generator=g).requires_grad_() if entries else None,
        "topk_indices": topk_indices,
        "sink": torch.randn(heads, generator=g).requires_grad_(),
        "scale": dim**-0.5,
    }


def leaves(arguments: dict) -> list[Tensor]:
    return [arguments[k] for k in ("q", "window_kv", "entries", "sink") if arguments[k] is not None]


def behind(arguments: dict, cut: int, window: int) -> dict:
    """The same inputs for the queries from `cut` on; of the window keys before it, those that they see."""
    cut_from = {name: arguments[name] for name in ("q", "topk_indices") if arguments[name] is not None}
    first = max(0, cut - (window - 1))
    return {
        **arguments,
        **{name: tensor[cut:].detach().requires_grad_(tensor.requires_grad) for name, tensor in cut_from.items()},
        "window_kv": arguments["window_kv"][first:].detach().requires_grad_(),
        "window_start": arguments["window_start"][cut:] - cut,
    }
