"""The report's optimisation, independent of any model: rules in, one optimizer out.

Read groups.py and optimizer.py first. Nothing here imports `train`, `model` or `data`; each file imports only those
before it:

    check                      refusals of settings
    schedule, settings         what a run can set; no torch
    groups                     which parameter is updated how
    ownership                  which process updates it
    adamw, muon, sinkhorn      the methods
    optimizer                  the step
    clip, balance              the gradient norm; the router biases

What is exported here is imported when it is first asked for, so that reading settings loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optim.balance import balance_step_, load_statistics, move_bias_
    from optim.clip import clip_, global_norm
    from optim.groups import Group, ParameterRow, Rule, assign, format_table
    from optim.optimizer import Optimizer
    from optim.ownership import ParameterPlacement
    from optim.schedule import Schedule
    from optim.settings import AdamWSettings, MuonSettings, Settings, SinkhornSettings

_HOME = {
    "AdamWSettings": "optim.settings",
    "Group": "optim.groups",
    "MuonSettings": "optim.settings",
    "Optimizer": "optim.optimizer",
    "ParameterPlacement": "optim.ownership",
    "ParameterRow": "optim.groups",
    "Rule": "optim.groups",
    "Schedule": "optim.schedule",
    "Settings": "optim.settings",
    "SinkhornSettings": "optim.settings",
    "assign": "optim.groups",
    "clip_": "optim.clip",
    "format_table": "optim.groups",
    "global_norm": "optim.clip",
    "load_statistics": "optim.balance",
    "move_bias_": "optim.balance",
    "balance_step_": "optim.balance",
}

__all__ = [
    "AdamWSettings",
    "Group",
    "MuonSettings",
    "Optimizer",
    "ParameterPlacement",
    "ParameterRow",
    "Rule",
    "Schedule",
    "Settings",
    "SinkhornSettings",
    "assign",
    "clip_",
    "format_table",
    "global_norm",
    "load_statistics",
    "move_bias_",
    "balance_step_",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
