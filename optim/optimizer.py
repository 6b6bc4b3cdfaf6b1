"""The one optimizer of a run: Muon, Sinkhorn-balanced momentum and AdamW, each on the parameters its rules name."""

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
from .settings import Settings
from .sinkhorn import not_split, sinkhorn_step

STATE_KEYS = {"muon": ("momentum",), "sinkhorn": ("momentum",), "adamw": ("mean", "square")}
SPLITTABLE = {("muon", 3), ("sinkhorn", 2), *(("adamw", dims) for dims in (1, 2, 3))}  # along the first axis
BROADCAST_ELEMENTS = 1 << 25  # updated weights sent in one message, which needs a copy of them


class Optimizer(torch.optim.Optimizer):
    """Three methods behind the interface of `torch.optim`.

    The learning rate is 0 until `set_lr` is called. State is always fp32 and is created at a parameter's first step.
    Parameters without a gradient and frozen groups are skipped. Weights are updated in their own dtype, so train with
    fp32 (master) weights: in bf16 most updates are below half a unit in the last place. Matrices must be whole in each
    process; a wrapper that flattens or slices parameters is refused at the step.

    With `placements` (parameter name -> which processes hold it) the work is divided: a parameter's state exists only
    at its owner, which updates the parameter and sends the result to the other processes that hold it. All processes
    must then step together, with gradients for the same parameters. A stack of matrices may be split by matrices, a
    Sinkhorn table by rows; nothing else may be split.
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
        if placements is not None:
            self._assign_owners(placements)

    def owns(self, param: Tensor) -> bool:
        """Whether this process updates the parameter and keeps its state."""
        return param not in self._placements or self._owners[param] == self._placements[param].replica_group.rank

    @property
    def parts(self) -> dict[Tensor, RankGroupLike]:
        """For each split parameter, the processes that it is split over."""
        return {param: place.shard_group for param, place in self._placements.items() if place.shard_group.size > 1}

    def state_bytes(self) -> int:
        """Bytes of optimizer state at this process once every parameter it owns has been trained."""
        sizes = (
            4 * param.numel() * len(STATE_KEYS[group["method"]])
            for group in self.param_groups
            for param in group["params"]
            if self.owns(param)
        )
        return sum(sizes)

    def set_lr(self, lr: float, factors: Mapping[str, float] | None = None) -> None:
        """Set the learning rate of the next steps: lr * lr_factor of the group * factor of its schedule.

        `factors` gives the factor of every named schedule; 0 freezes its groups. Raises ValueError if a group's
        schedule is missing.
        """
        known = {MAIN: 1.0, **(factors or {})}
        missing = {group["schedule"] for group in self.param_groups} - known.keys()
        if missing:
            raise ValueError(f"no factor for schedule {', '.join(sorted(missing))}; given: {', '.join(sorted(known))}")
        for group in self.param_groups:
            group["factor"] = known[group["schedule"]]
            group["lr"] = lr * group["lr_factor"] * group["factor"]

    def active_parameters(self) -> Iterator[Tensor]:
        """Parameters of the groups that are not frozen: what gradient clipping should count."""
        return (p for group in self.param_groups if group["factor"] for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient and are not frozen. `closure`, if given, recomputes the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [param for group in self.param_groups if group["factor"] for param in self._step_group(group)]
        self._broadcast_updated(stepped)
        return loss

    def table(self) -> list[ParameterRow]:
        """One row per parameter, sorted by name; print with `format_table`."""
        rows = []
        for group in self.param_groups:
            for name, param, blocks in zip(group["names"], group["params"], group["blocks"], strict=True):
                text = blocks_text(param.shape, blocks) if group["method"] == "muon" else "-"
                numbers = group["lr_factor"], group["weight_decay"], group["schedule"]
                rows.append(ParameterRow(name, group["method"], tuple(param.shape), text, *numbers))
        return sorted(rows)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a `state_dict` exactly: values, dtypes, step counts. (The inherited method would cast to
        the parameters' dtype.) Parameters are matched by name; state that other processes own is skipped.
        Hyper-parameters stay as the rules set them.

        Raises ValueError, with every difference in names, methods or shapes, before anything is changed.
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
        """Update the parameters of the group that this process owns; returns those that any process updates."""
        trained = [i for i, param in enumerate(group["params"]) if param.grad is not None]
        self._check(group, trained)
        chosen = [i for i in trained if self.owns(group["params"][i])]
        if chosen:
            self._update(group, chosen)
        return [group["params"][i] for i in trained]

    def _update(self, group: dict[str, Any], chosen: Sequence[int]) -> None:
        params = [group["params"][i] for i in chosen]
        grads = [param.grad for param in params]
        states = [self._state(param, STATE_KEYS[group["method"]]) for param in params]
        buffers = [[state[key] for state in states] for key in STATE_KEYS[group["method"]]]
        numbers = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if group["method"] == "muon":
            blocks = [group["blocks"][i] for i in chosen]
            (momenta,) = buffers
            muon_step(params, grads, momenta, blocks, **numbers, settings=self.settings.muon)
        elif group["method"] == "sinkhorn":
            parts = self.parts
            (momenta,) = buffers
            for param, grad, momentum in zip(params, grads, momenta, strict=True):
                reduce = partial(_sum_over, parts[param]) if param in parts else not_split
                settings = self.settings.sinkhorn
                sinkhorn_step(param, grad, momentum, lr=group["lr"], settings=settings, reduce=reduce)
        else:
            for state in states:
                state["step"] = state.get("step", 0) + 1
            means, squares = buffers
            steps = [state["step"] for state in states]
            adamw_step(params, grads, means, squares, steps, **numbers, settings=self.settings.adamw)

    def _assign_owners(self, placements: Mapping[str, ParameterPlacement]) -> None:
        """Choose owners inside each replica group, balanced by bytes of state. Every process makes the same choice. The
        owners of a split parameter's parts form one complete copy, so that they can sum over it.
        """
        kinds: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for group in self.param_groups:
            for name, param in zip(group["names"], group["params"], strict=True):
                place = self._placements[param] = placements[name]
                if place.shard_group.size > 1 and (group["method"], param.dim()) not in SPLITTABLE:
                    what = f"{name}: {group['method']} cannot update a {param.dim()}-D parameter that is split"
                    raise ValueError(f"{what}; its matrices must be whole in one process")
                kinds[place.shard_group.size].append((param, place.numel * len(STATE_KEYS[group["method"]])))
        for held in kinds.values():
            owners = assign_owners([size for _, size in held], self._placements[held[0][0]].replica_group.size)
            self._owners |= {param: owner for (param, _), owner in zip(held, owners, strict=True)}

    def _broadcast_updated(self, stepped: Sequence[Tensor]) -> None:
        """Send each updated parameter from its owner to the other holders, several in a message."""
        messages: dict[tuple, list[Tensor]] = defaultdict(list)
        for param in stepped:
            place = self._placements.get(param)
            if place is not None and place.replica_group.size > 1:
                messages[place.shard_group.size, self._owners[param], param.dtype].append(param)
        for (_, owner, _), params in messages.items():
            replicas = self._placements[params[0]].replica_group
            for batch in _batches(params):
                flat = torch.cat([param.flatten() for param in batch])
                dist.broadcast(flat, group=replicas.group, group_src=owner)
                if replicas.rank != owner:
                    for param, new in zip(batch, flat.split([param.numel() for param in batch]), strict=True):
                        param.copy_(new.view_as(param))

    def _state(self, param: Tensor, keys: Sequence[str]) -> dict[str, Any]:
        state = self.state[param]
        for key in keys:
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=torch.float32)
        return state

    @staticmethod
    def _check(group: dict[str, Any], chosen: Sequence[int]) -> None:
        """Refuse what a wrapper may have turned the parameters into: flattened slices, sparse gradients."""
        dims = {"muon": (2, 3), "sinkhorn": (2,)}.get(group["method"])
        for i in chosen:
            name, param = group["names"][i], group["params"][i]
            if dims and param.dim() not in dims:
                raise ValueError(
                    f"{name}: shape {list(param.shape)}; {group['method']} needs the whole matrix in one process"
                )
            if param.grad.is_sparse:
                raise ValueError(f"{name}: sparse gradients are not supported; build the embedding with sparse=False")


def _sum_over(ranks: RankGroupLike, tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, group=ranks.group)
    return tensor


def _batches(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    room = BROADCAST_ELEMENTS
    for param in params:
        if batch and param.numel() > room:
            yield batch
            batch, room = [], BROADCAST_ELEMENTS
        batch.append(param)
        room -= param.numel()
    yield batch
