"""Parameters whose rows several processes keep, brought together at their owners for the update.

A matrix that Muon updates must be whole. Between steps its rows lie with G processes (`RowGroups.keepers`). A step
collects gradient and weight at the owner (`optim/ownership.py`), updates there as if nothing were split, and hands the
rows out again: first to the owner's own set of keepers, then from each of these to the processes that keep the same
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .ownership import RankGroupLike, RowGroups

MESSAGE_ELEMENTS = 1 << 25  # the most that a process sends of whole parameters in one message, unless one is larger


class Collected(NamedTuple):
    """Gradients that lie whole with one process each. `gradients`: by parameter, None where another process has it;
    `ranks`: the processes that they are spread over, None if there are none.
    """

    gradients: Mapping[Tensor, Tensor | None]
    ranks: RankGroupLike | None


NOTHING = Collected({}, None)


def rows_here(tensor: Tensor) -> Tensor:
    """The rows of a parameter or gradient that this process keeps, as a plain tensor that shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor, whose import takes half a second


class RowExchange:
    """Moves parameters, or what is shaped like them, between the keepers of their rows and their owners.

    All processes call its methods together and with the same parameters. `owners`: by parameter, the owner's position
    in the parameter's replica group.
    """

    def __init__(self, groups: RowGroups, owners: Mapping[Tensor, int]) -> None:
        self.groups, self.owners = groups, owners

    @torch.no_grad()
    def collect(self, rows: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """From the rows that each process keeps, by parameter, the whole tensors of the parameters this one owns."""
        ranks = self.groups.keepers
        whole: dict[Tensor, Tensor] = {}
        for by_owner in self._messages(rows):
            own = by_owner[ranks.rank]
            kept = [rows[param].flatten() for params in by_owner for param in params]
            send = [sum(rows[param].numel() for param in params) for params in by_owner]
            receive = [sum(self._span(param, keeper)[1] for param in own) for keeper in range(ranks.size)]
            found = kept[0].new_empty(sum(receive))
            dist.all_to_all_single(found, torch.cat(kept), receive, send, group=ranks.group)
            parts: dict[Tensor, list[Tensor]] = defaultdict(list)
            for keeper, received in enumerate(found.split(receive)):
                sizes = [self._span(param, keeper)[1] for param in own]
                for param, part in zip(own, received.split(sizes), strict=True):
                    parts[param].append(part)
            whole |= {param: torch.cat(parts[param]).view(param.shape) for param in own}
        return whole

    @torch.no_grad()
    def hand_out(self, whole: Mapping[Tensor, Tensor], rows: Mapping[Tensor, Tensor]) -> None:
        """Write what the owners have in `whole` into the `rows` of every process."""
        ranks = self.groups.keepers
        for by_owner in self._messages(rows):
            own = by_owner[ranks.rank]
            spans = [[self._span(param, keeper) for param in own] for keeper in range(ranks.size)]
            flat = [whole[param].flatten() for param in own]
            parts = [one.narrow(0, *span) for row in spans for one, span in zip(flat, row, strict=True)]
            targets = [rows[param] for params in by_owner for param in params]
            receive = [sum(rows[param].numel() for param in params) for params in by_owner]
            found = targets[0].new_empty(sum(receive))
            sent = torch.cat(parts) if parts else found.new_empty(0)
            dist.all_to_all_single(
                found, sent, receive, [sum(size for _, size in row) for row in spans], group=ranks.group
            )
            _unpack(found, targets)
        self._copy(rows)

    def _copy(self, rows: Mapping[Tensor, Tensor]) -> None:
        """Send the rows from the owners' own keepers to the processes that keep the same ones."""
        copies = self.groups.copies
        if copies.size == 1:
            return
        for origin in range(copies.size):
            for batch in batches([p for p in rows if self.owners[p] // self.groups.keepers.size == origin]):
                targets = [rows[param] for param in batch]
                flat = torch.cat([target.flatten() for target in targets])
                dist.broadcast(flat, group=copies.group, group_src=origin)
                if copies.rank != origin:
                    _unpack(flat, targets)

    def _messages(self, rows: Mapping[Tensor, Tensor]) -> Iterator[list[list[Tensor]]]:
        """The parameters that this process's set of keepers owns, several in a message, by owner among the keepers."""
        size = self.groups.keepers.size
        here = [param for param in rows if self.owners[param] // size == self.groups.copies.rank]
        for batch in batches(here, MESSAGE_ELEMENTS * size):
            yield [[param for param in batch if self.owners[param] % size == keeper] for keeper in range(size)]

    def _span(self, param: Tensor, keeper: int) -> tuple[int, int]:
        """First element and number of elements of the rows that one of the keepers keeps."""
        rows, entry = param.shape[0], param.shape[1:].numel()
        height = -(-rows // self.groups.keepers.size)
        first, end = (min(place * height, rows) for place in (keeper, keeper + 1))
        return first * entry, (end - first) * entry


def _unpack(flat: Tensor, targets: Sequence[Tensor]) -> None:
    for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view_as(target))


def batches(params: Sequence[Tensor], most: int = MESSAGE_ELEMENTS) -> Iterator[list[Tensor]]:
    """Consecutive parameters with at most so many elements together, unless one has more."""
    batch: list[Tensor] = []
    room = most
    for param in params:
        if batch and param.numel() > room:
            yield batch
            batch, room = [], most
        batch.append(param)
        room -= param.numel()
    if batch:
        yield batch
