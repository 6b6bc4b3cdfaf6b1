"""Measures the recall of the indexers on some held-out documents: the share of the attention mass of the true top-k
entries that lies on the entries selected by the indexers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from model import indexer_recall
from model.vision import START as IMAGE_START
from train.build import Batch, Run

PROBE_TOKENS = 1024  # largest number of tokens measured; the cost grows with the square of this number


@dataclass
class Probe:
    """Measures ``model.indexer_recall`` of every layer with an indexer, on the first held-out documents.

    The measured documents have at most ``PROBE_TOKENS`` tokens in total. Which documents are measured does not depend
    on the number of processes or on the number of rows in a batch.
    """

    run: Run
    recall: list[float | None] = field(default_factory=list)  # None: no query sees more entries than the top-k
    seen: int = 0  # number of tokens in the batches so far, over all ranks
    sums: torch.Tensor | float = 0.0

    def add(self, batch: Batch) -> None:
        """Include the next batch of every rank in the measurement. All ranks call this method together."""
        if self.seen >= PROBE_TOKENS:
            return
        world, seen = self.run.world, self.seen
        # Every rank measures whole documents; ranks that share rows under context parallelism leave them to the first.
        lengths = batch["seq_lens"] * world.counts_rows
        sizes = world.gather(int(lengths.sum()))
        self.seen += sum(sizes)
        end = seen + sum(sizes[: world.rank]) + lengths.flatten().cumsum(0)
        kept = torch.where(end <= PROBE_TOKENS, lengths.flatten(), 0).view_as(lengths)
        if not world.any(bool(kept.any())):
            if seen or "pixel_values" in batch:
                return
            if world.first:  # the first document alone is longer than PROBE_TOKENS
                kept[0, 0] = PROBE_TOKENS
        recall = indexer_recall(self.run.model, _first_documents(batch, kept), self._all)
        self.recall = [None if math.isnan(value) else value for value in recall.tolist()]

    def _all(self, sums: torch.Tensor) -> torch.Tensor:
        self.sums = self.run.world.sum_(sums) + self.sums
        return self.sums


def _first_documents(batch: Batch, kept: torch.Tensor) -> Batch:
    """Cut the batch down to its first documents by replacing ``seq_lens`` with ``kept``: the lengths of these
    documents, followed by zeros.
    """
    probe, _ = with_a_token({**batch, "seq_lens": kept})
    if "pixel_values" in batch:
        real = torch.arange(batch["input_ids"].shape[1], device=kept.device) < kept.sum(1, keepdim=True)
        grids = batch["image_grid_hws"][: ((batch["vision_token_types"] == IMAGE_START) & real).sum()]
        probe.update(image_grid_hws=grids, pixel_values=batch["pixel_values"][: grids.prod(1).sum()])
    return probe


def with_a_token(batch: Batch) -> tuple[Batch, bool]:
    """If a batch has only padding, add one unsupervised token to it. Returns the batch, and whether it had tokens
    before.

    All ranks must run the model together, but a rank may get only padding when the last held-out rows are divided.
    """
    if batch["seq_lens"].any():
        return batch, True
    lengths = batch["seq_lens"].clone()
    lengths[0, 0] = 1
    return {**batch, "seq_lens": lengths}, False
