"""Computes the layout of one rank's chunk of a micro-batch, for context parallelism.

Every rank computes the layout of all tokens and then keeps only the queries of its chunk. Document numbers, slots,
visible ranges, positions, and the selections that depend on them are therefore the same as with one process. This file
also plans, on the CPU, which rows the ranks send to each other; model/parallel/context.py sends these rows.

In shapes, A is the number of tokens in the micro-batch, T the number of tokens in this rank's chunk, C the number of
ranks and N the number of entry slots.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from model.config import TextConfig
from model.layout import Chunk, Entries, SequenceLayout
from model.parallel.context import GatherPlan, HaloPlan, chunk_bounds
from model.parallel.ranks import RankGroup


def chunk_of(
    layout: SequenceLayout, config: TextConfig, ranks: RankGroup, takes_feature: Tensor | None = None
) -> SequenceLayout:
    """Returns the layout of this rank's chunk. The tokens of `layout` are cut into consecutive chunks whose sizes
    differ by at most one token, one chunk for each rank; if there are fewer tokens than ranks, the last ranks get empty
    chunks. The returned layout shares no memory with the layout of all tokens, except the document lengths.

    takes_feature: bool [B, S], marks the tokens whose embedding is an image feature; None if there is no image.
    """
    device, layout = layout.position.device, layout.to(torch.device("cpu"))
    cuts = chunk_bounds(layout.tokens, ranks.size)
    start, stop = int(cuts[ranks.rank]), int(cuts[ranks.rank + 1])
    own = slice(start, stop)
    place = torch.arange(layout.tokens) if layout.gather is None else layout.gather
    before = slice(max(0, start - (config.engram_max_ngram_size - 1) * bool(config.engram_layer_ids)), start)
    chunk = Chunk(
        ranks=ranks,
        window=_halo(torch.cat([layout.window_start, cuts[-1:]])[cuts[:-1]], cuts, ranks.rank),
        lookback=place[before].clone(),
        lookback_image=None if layout.image is None else layout.image[before].clone(),
        feature_slots=_feature_slots(takes_feature, place, start, stop),
    )
    return replace(
        layout,
        gather=place[own].clone(),
        document=layout.document[own].clone(),
        document_start=layout.document_start[own] - start,
        window_start=layout.window_start[own] - start,
        decoder_window_start=layout.decoder_window_start[own] - start,
        position=layout.position[own].clone(),
        image=None if layout.image is None else layout.image[own].clone(),
        phasors=layout.phasors[own].clone(),
        phasors_yarn=layout.phasors_yarn[own].clone(),
        entries={ratio: _own_entries(entries, cuts, ranks.rank) for ratio, entries in layout.entries.items()},
        chunk=chunk,
    ).to(device)


def _own_entries(entries: Entries, cuts: Tensor, rank: int) -> Entries:
    """Returns the `Entries` of this rank's chunk. Each slot (the compressed entry of a group of tokens) is computed by
    the rank whose chunk contains the group's last token, so a rank's slots are consecutive.
    """
    start, stop = int(cuts[rank]), int(cuts[rank + 1])
    begins = torch.searchsorted(entries.members[:, -1].contiguous(), cuts)  # each rank's first slot
    plan = GatherPlan(tuple(begins.diff().tolist()))
    # a slot's first token may lie before the chunk; every rank computes the first needed token of all ranks
    needed_from = cuts[:-1].clone()
    has = begins.diff() > 0
    needed_from[has] = needed_from[has].minimum(entries.members[begins[:-1][has], 0])
    halo = _halo(needed_from, cuts, rank)
    # behind the rank's slots, the index runs on into those of other ranks, for rows without meaning
    own = (int(begins[rank]) + torch.arange(plan.capacity)).clamp(max=entries.slots - 1)
    unused = torch.arange(plan.capacity) >= plan.sizes[rank]
    members = (entries.members[own] - (start - halo.tokens)).masked_fill(unused[:, None], 0)
    return replace(
        entries,
        members=members,
        phasors=entries.phasors[own],
        visible_from=entries.visible_from[start:stop].clone(),
        visible_to=entries.visible_to[start:stop].clone(),
        host_from=entries.host_from[start:stop].copy(),
        host_to=entries.host_to[start:stop].copy(),
        halo=halo,
        gathered=plan,
    )


def _halo(needed_from: Tensor, cuts: Tensor, rank: int) -> HaloPlan:
    """Plan which rows (token vectors) of earlier chunks each rank receives. The received rows may come from several
    ranks.

    needed_from: int64 [C], the index of the first token that each rank needs; for a rank that needs no earlier token,
    the first token of its own chunk.
    """
    needs, bounds = needed_from.tolist(), cuts.tolist()
    chunks = list(pairwise(bounds))
    sent = [_common(chunks[rank], (need, cut)) for need, cut in zip(needs, bounds[:-1], strict=True)]
    received = [_common(chunk, (needs[rank], bounds[rank])) for chunk in chunks]
    index = torch.cat([torch.arange(span.start, span.stop) for span in sent]) - bounds[rank]
    return HaloPlan(index, tuple(map(len, sent)), tuple(map(len, received)))


def _common(one: tuple[int, int], other: tuple[int, int]) -> range:
    begin = max(one[0], other[0])
    return range(begin, max(begin, min(one[1], other[1])))


def _feature_slots(takes: Tensor | None, place: Tensor, start: int, stop: int) -> tuple[int, int, int]:
    if takes is None:
        return 0, 0, 0
    takes = takes.cpu().reshape(-1)[place]
    return int(takes[:start].sum()), int(takes[start:stop].sum()), int(takes.sum())
