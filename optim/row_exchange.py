"""Updates parameters whose rows are divided over several processes. For the update, the process that owns a parameter
gathers all its rows.

Muon can only update whole matrices, but between steps the rows of a matrix are divided over several processes
(`RowGroups.keepers`). In a step, the process that owns a matrix (`optim/ownership.py`) gathers the gradient and the
weight, and updates the whole matrix. The owner then sends the rows to the processes of its own set of keepers, and each
of these processes sends its rows on to the processes of other sets that keep the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .ownership import RankGroupLike, RowGroups

MESSAGE_ELEMENTS = 1 << 25  # maximum elements that a process sends in one message, unless a single parameter is larger


class Collected(NamedTuple):
    """Whole gradients, each of which is held by a single process. `gradients`: maps each parameter to its gradient, or
    to None if another process holds the gradient. `ranks`: the group of processes that hold whole gradients, or None if
    there are no whole gradients.
    """

    gradients: Mapping[Tensor, Tensor | None]
    ranks: RankGroupLike | None


NOTHING = Collected({}, None)


def rows_here(tensor: Tensor) -> Tensor:
    """Returns the rows of a parameter or gradient that this process keeps, as a plain tensor that shares memory with
    it.
    """
    tensor = tensor.detach()
    # A DTensor; importing its class for a check would take half a second
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class RowExchange:
    """Moves parameters, or tensors with the shapes of parameters (such as gradients), between the processes that keep
    the rows of a parameter and the process that owns the parameter.

    All processes must call the methods of this class together, and with the same parameters. `owners`: maps each
    parameter to the position of its owner in the parameter's replica group.
    """

    def __init__(self, groups: RowGroups, owners: Mapping[Tensor, int]) -> None:
        self.groups, self.owners = groups, owners

    @torch.no_grad()
    def collect(self, rows: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Gather the `rows` that each process keeps of every parameter. Returns the whole tensors of the parameters
        that this process owns.
        """
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
        """Send the rows of the `whole` tensors from the owners of the parameters to all processes, and write the rows
        into the tensors `rows` of every process.
        """
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
        """Send rows from each process of the owner's set of keepers to the processes of other sets that keep the same
        rows.
        """
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
        """Yield the messages for the parameters owned by this process's set of keepers. A message is a list with one
        entry for each process of the set: the list of parameters in the message that this process owns.
        """
        size = self.groups.keepers.size
        here = [param for param in rows if self.owners[param] // size == self.groups.copies.rank]
        for batch in batches(here, MESSAGE_ELEMENTS * size):
            yield [[param for param in batch if self.owners[param] % size == keeper] for keeper in range(size)]

    def _span(self, param: Tensor, keeper: int) -> tuple[int, int]:
        """Returns the index of the first element, and the number of elements, of the rows of `param` that the process
        `keeper` keeps.
        """
        rows, entry = param.shape[0], param.shape[1:].numel()
        height = -(-rows // self.groups.keepers.size)
        first, end = (min(place * height, rows) for place in (keeper, keeper + 1))
        return first * entry, (end - first) * entry


def _unpack(flat: Tensor, targets: Sequence[Tensor]) -> None:
    for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view_as(target))


def batches(params: Sequence[Tensor], most: int = MESSAGE_ELEMENTS) -> Iterator[list[Tensor]]:
    """Yield groups of consecutive parameters with at most `most` elements in total; a larger parameter is a group by
    itself.
    """
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
