"""Optimizer, learning-rate schedule and router balancing of the V4.1 report; independent of the model.

Read groups.py and optimizer.py first; the V4.1 report's table, which names a method for every parameter of the model,
is in train/param_groups.py. This package does not import `train`, `model` or `data`. Each file imports only files
listed before it:

    check:                     checks that settings are valid.
    schedule:                  the learning-rate schedule and its settings; imports no torch.
    settings:                  the settings of the update methods; imports no torch.
    groups:                    which method updates which parameter.
    ownership:                 which process updates a parameter.
    row_exchange:              updates parameters whose rows are divided over several processes.
    adamw, muon, sinkhorn:     the three update methods.
    optimizer:                 the optimizer step.
    clip:                      gradient clipping.
    balance:                   updates of the router biases.

The names that the package exports are imported lazily, so that reading settings does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optim.balance import balance_step_, load_statistics
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
    "balance_step_",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
