"""The optimizer of a run, which updates each parameter by the method that its rule sets (Muon, Sinkhorn or AdamW)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .adamw import adamw_step
from .groups import MAIN, Group, ParameterRow, blocks_text
from .muon import muon_step
from .ownership import ParameterPlacement, RankGroupLike, assign_owners
from .row_exchange import NOTHING, Collected, RowExchange, batches, rows_here
from .settings import Settings
from .sinkhorn import not_split, sinkhorn_step

STATE_KEYS = {"muon": ("momentum",), "sinkhorn": ("momentum",), "adamw": ("mean", "square")}
# (method, number of axes) of the parameters that may be split over processes, along their first axis.
SPLITTABLE = {("muon", 3), ("sinkhorn", 2), *(("adamw", dims) for dims in (1, 2, 3))}


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer that uses Muon, Sinkhorn-balanced momentum or AdamW for each parameter group.

    The learning rate is 0 until `set_lr` is called. The optimizer state is always fp32 and is created when a parameter
    is first updated. Parameters without a gradient and frozen groups are skipped. Weights are updated in their own
    dtype, so train with fp32 (master) weights: in bf16 most updates are below half a unit in the last place. Each
    process must hold whole matrices; `step` raises an error if a wrapper has flattened or sliced a parameter.

    With `placements` (a map from parameter names to the processes that hold them) the processes divide the optimizer
    state: only the owner of a parameter keeps its state, updates the parameter and sends the result to the other
    processes that hold it. All processes must then step together, with gradients for the same parameters. A 3-D stack
    of matrices may be split over processes by matrix, a table updated by Sinkhorn by row, and a parameter of AdamW
    along its first axis; no other parameter may be split. If the placement of a parameter has `rows` (the parameter is
    a `DTensor`), each process keeps some of its rows, but the owner updates the whole parameter; `collect_gradients`
    must then be called before clipping.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        settings: Settings | None = None,
        placements: Mapping[str, ParameterPlacement] | None = None,
    ) -> None:
        self.settings = settings or Settings()
        super().__init__([{**vars(group), "factor": 1.0} for group in groups], {"lr": 0.0})
        self._placements: dict[Tensor, ParameterPlacement] = {}
        self._owners: dict[Tensor, int] = {}
        self._rows: RowExchange | None = None
        # During a step: the whole weights of row-divided parameters that this process owns
        self._weights: dict[Tensor, Tensor] = {}
        self.collected = NOTHING  # set from `collect_gradients` until the end of the step
        if placements is not None:
            self._assign_owners(placements)

    def owns(self, param: Tensor) -> bool:
        """Whether this process updates the parameter and keeps its state."""
        return param not in self._placements or self._owners[param] == self._placements[param].replica_group.rank

    @property
    def parts(self) -> dict[Tensor, RankGroupLike]:
        """Maps each parameter that is split over processes to the group of these processes."""
        return {param: place.shard_group for param, place in self._placements.items() if place.shard_group.size > 1}

    def collect_gradients(self) -> None:
        """Gather the gradients of all parameters whose rows are divided over processes: the owner of a parameter gets
        the whole gradient in `collected`, and the gradients are removed from the parameters. All processes must call
        this method together, with gradients for the same parameters.
        """
        if self._rows is None:
            return
        rows = {param: rows_here(param.grad) for param in self._rows.owners if param.grad is not None}
        whole = self._rows.collect(rows)
        for param in rows:
            param.grad = None
        everyone = self._placements[next(iter(self._rows.owners))].replica_group
        self.collected = Collected({param: whole.get(param) for param in rows}, everyone)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this process, once it has updated every parameter that it owns."""
        sizes = (
            4 * param.numel() * len(STATE_KEYS[group["method"]])
            for group in self.param_groups
            for param in group["params"]
            if self.owns(param)
        )
        return sum(sizes)

    def set_lr(self, lr: float, factors: Mapping[str, float] | None = None) -> None:
        """Set the learning rate of the next steps: each group gets lr * its lr_factor * the factor of its schedule.

        `factors` gives the factor of every named schedule; a factor of 0 freezes the groups with that schedule. Raises
        ValueError if `factors` lacks the schedule of a group.
        """
        known = {MAIN: 1.0, **(factors or {})}
        missing = {group["schedule"] for group in self.param_groups} - known.keys()
        if missing:
            raise ValueError(
                f"set_lr got no factor for schedule {', '.join(sorted(missing))}; "
                f"it got factors for {', '.join(sorted(known))}"
            )
        for group in self.param_groups:
            group["factor"] = known[group["schedule"]]
            group["lr"] = lr * group["lr_factor"] * group["factor"]

    def active_parameters(self) -> Iterator[Tensor]:
        """The parameters of all groups that are not frozen; gradient clipping should use exactly these."""
        return (p for group in self.param_groups if group["factor"] for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient and are not frozen. `closure`, if given, recomputes the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rows = {param: rows_here(param) for param in self.collected.gradients}
        if self._rows is not None:
            self._weights = self._rows.collect(rows)
        stepped = [param for group in self.param_groups if group["factor"] for param in self._step_group(group)]
        self._broadcast_updated([param for param in stepped if param not in rows])
        if self._rows is not None:
            self._rows.hand_out(self._weights, rows)
        self._weights, self.collected = {}, NOTHING
        return loss

    def table(self) -> list[ParameterRow]:
        """One table row per parameter, sorted by name; `format_table` prints the rows."""
        rows = []
        for group in self.param_groups:
            for name, param, blocks in zip(group["names"], group["params"], group["blocks"], strict=True):
                text = blocks_text(param.shape, blocks) if group["method"] == "muon" else "-"
                numbers = group["lr_factor"], group["weight_decay"], group["schedule"]
                rows.append(ParameterRow(name, group["method"], tuple(param.shape), text, *numbers))
        return sorted(rows)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer state from a `state_dict` with exactly the saved values, dtypes and step counts.

        The inherited method would cast the state to the parameters' dtype. Parameters are matched by name, and state
        that other processes own is skipped. Hyper-parameters are not restored: they stay as the rules set them.

        Raises ValueError that lists every difference in names, methods or shapes; the optimizer is then unchanged.
        """
        saved = {}
        for group in state_dict["param_groups"]:
            for name, index in zip(group["names"], group["params"], strict=True):
                saved[name] = group["method"], state_dict["state"].get(index, {})
        problems, restored = [], {}
        for group in self.param_groups:
            for name, param in zip(group["names"], group["params"], strict=True):
                method, state = saved.pop(name, (None, {}))
                if method != group["method"]:
                    problems.append(f"{name}: method is {group['method']}, in the checkpoint {method or 'missing'}")
                    continue
                problems += [
                    f"{name}: {key} is {list(value.shape)} in the checkpoint, the parameter is {list(param.shape)}"
                    for key, value in state.items()
                    if isinstance(value, Tensor) and value.shape != param.shape
                ]
                if state and self.owns(param):
                    restored[param] = {
                        k: v.to(param.device, copy=True) if isinstance(v, Tensor) else v for k, v in state.items()
                    }
        problems += [f"{name}: in the checkpoint, but not in this run" for name in saved]
        if problems:
            raise ValueError("optimizer state does not fit this run:\n  " + "\n  ".join(problems))
        self.state = defaultdict(dict, restored)

    def _step_group(self, group: dict[str, Any]) -> list[Tensor]:
        """Update those parameters of the group that this process owns; returns the parameters that all processes
        together update.
        """
        collected = self.collected.gradients
        trained = [i for i, param in enumerate(group["params"]) if param.grad is not None or param in collected]
        self._check(group, trained)
        chosen = [i for i in trained if self.owns(group["params"][i])]
        if chosen:
            self._update(group, chosen)
        return [group["params"][i] for i in trained]

    def _update(self, group: dict[str, Any], chosen: Sequence[int]) -> None:
        held = [group["params"][i] for i in chosen]
        grads = [self.collected.gradients.get(param, param.grad) for param in held]
        params = [self._weights.get(param, param) for param in held]
        states = [self._state(param, STATE_KEYS[group["method"]]) for param in held]
        buffers = [[state[key] for state in states] for key in STATE_KEYS[group["method"]]]
        numbers = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if group["method"] == "muon":
            blocks = [group["blocks"][i] for i in chosen]
            (momenta,) = buffers
            muon_step(params, grads, momenta, blocks, **numbers, settings=self.settings.muon)
        elif group["method"] == "sinkhorn":
            parts = self.parts
            (momenta,) = buffers
            for param, weight, grad, momentum in zip(held, params, grads, momenta, strict=True):
                reduce = partial(_sum_over, parts[param]) if param in parts else not_split
                settings = self.settings.sinkhorn
                sinkhorn_step(weight, grad, momentum, lr=group["lr"], settings=settings, reduce=reduce)
        else:
            for state in states:
                state["step"] = state.get("step", 0) + 1
            means, squares = buffers
            steps = [state["step"] for state in states]
            adamw_step(params, grads, means, squares, steps, **numbers, settings=self.settings.adamw)

    def _assign_owners(self, placements: Mapping[str, ParameterPlacement]) -> None:
        """Choose the owner of each parameter among the processes that hold the same values, so that the bytes of state
        are balanced. Every process computes the same assignment. If a parameter is split into parts, the owners of the
        parts belong to one shard group, so that an all-reduce in this group gives sums over the whole parameter.
        """
        kinds: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for group in self.param_groups:
            for name, param in zip(group["names"], group["params"], strict=True):
                place = self._placements[param] = placements[name]
                if place.shard_group.size > 1 and (group["method"], param.dim()) not in SPLITTABLE:
                    what = f"{name}: {group['method']} cannot update a {param.dim()}-D parameter that is split"
                    raise ValueError(f"{what}; every process that holds the parameter must hold all of it")
                kinds[place.shard_group.size].append((param, place.numel * len(STATE_KEYS[group["method"]])))
        for held in kinds.values():
            owners = assign_owners([size for _, size in held], self._placements[held[0][0]].replica_group.size)
            self._owners |= {param: owner for (param, _), owner in zip(held, owners, strict=True)}
        rows = {param: place.rows for param, place in self._placements.items() if place.rows is not None}
        if rows:
            self._rows = RowExchange(next(iter(rows.values())), {param: self._owners[param] for param in rows})

    def _broadcast_updated(self, stepped: Sequence[Tensor]) -> None:
        """Broadcast each updated parameter from its owner to the other processes that hold it, several parameters in
        one message.
        """
        messages: dict[tuple, list[Tensor]] = defaultdict(list)
        for param in stepped:
            place = self._placements.get(param)
            if place is not None and place.replica_group.size > 1:
                messages[place.shard_group.size, self._owners[param], param.dtype].append(param)
        for (_, owner, _), params in messages.items():
            replicas = self._placements[params[0]].replica_group
            for batch in batches(params):
                flat = torch.cat([param.flatten() for param in batch])
                dist.broadcast(flat, group=replicas.group, group_src=owner)
                if replicas.rank != owner:
                    for param, new in zip(batch, flat.split([param.numel() for param in batch]), strict=True):
                        param.copy_(new.view_as(param))

    def _state(self, param: Tensor, keys: Sequence[str]) -> dict[str, Any]:
        state = self.state[param]
        for key in keys:
            if key not in state:
                state[key] = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
        return state

    @staticmethod
    def _check(group: dict[str, Any], chosen: Sequence[int]) -> None:
        """Raise ValueError for a parameter that a wrapper has flattened or sliced, and for sparse gradients."""
        dims = {"muon": (2, 3), "sinkhorn": (2,)}.get(group["method"])
        for i in chosen:
            name, param = group["names"][i], group["params"][i]
            if dims and param.dim() not in dims:
                raise ValueError(
                    f"{name}: the parameter has shape {list(param.shape)}, but {group['method']} needs whole matrices "
                    "in each process"
                )
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(f"{name}: sparse gradients are not supported; build the embedding with sparse=False")


def _sum_over(ranks: RankGroupLike, tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, group=ranks.group)
    return tensor
