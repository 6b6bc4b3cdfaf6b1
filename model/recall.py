"""Measures how well the indexers select entries, compared with dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from model.backbone import DeepseekV41
from model.layout import build_layout


@torch.no_grad()
def indexer_recall(
    model: DeepseekV41, batch: dict[str, Tensor], reduce: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """The recall of each indexer: the attention mass of its selection as a fraction (0..1) of the best possible
    selection, fp32 [indexers].

    The reference is dense attention over all visible entries in the layers that use the selection, with the attention
    mass summed over heads and layers. The recall of a query is the mass on its selected entries divided by the mass on
    the k entries with the most mass. The recall of an indexer is the average over the queries that see more than k
    entries (NaN if there are none). The cost is quadratic in the sequence length, so use a small batch. `reduce` sums a
    tensor over the processes if each process has a part of the batch.
    """
    text, runtime = model.config.text, model.runtime
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    pixels = (inputs.pop("pixel_values", None), inputs.pop("image_grid_hws", None))
    layout = build_layout(text, **inputs)
    model.runtime = replace(runtime, probe=True)
    try:
        trace = model.run_backbone(batch["input_ids"], layout, *pixels, batch.get("vision_token_types"))
    finally:
        model.runtime = runtime
    recalls = []
    for source in text.index_source_layer_ids:
        truth = trace.dense_attention_mass[source]
        learned = trace.blocks[source].indexer_loss_inputs
        assert learned is not None  # layers with an indexer have indexer loss inputs
        selected = learned.topk_indices
        seen = layout.entries[text.ratio(source)]
        rows = (seen.visible_to - seen.visible_from > text.index_topk).nonzero().flatten()
        truth, selected = truth[rows], selected[rows].long()
        held = (truth.gather(1, selected.clamp(min=0)) * (selected >= 0)).sum(-1)
        best = truth.topk(min(text.index_topk, truth.shape[1]), dim=-1).values.sum(-1)
        share = held / best.clamp(min=torch.finfo(torch.float32).tiny)
        recalls.append(torch.stack([share.sum(), share.new_tensor(share.numel())]))
    if not recalls:
        return torch.empty(0)
    total, number = reduce(torch.stack(recalls)).unbind(-1)
    return total / number
