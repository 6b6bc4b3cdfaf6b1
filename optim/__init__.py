"""The report's optimisation, independent of any model: rules in, one optimizer out.

Read in this order: groups (who gets what), optimizer (the step), muon, sinkhorn, adamw; then clip, schedule, balance.
"""

from .adamw import AdamWSettings
from .balance import load_statistics, update_router_bias_, update_router_biases_
from .clip import clip_, global_norm
from .groups import Group, ParameterRow, Rule, assign, format_table
from .muon import MuonSettings
from .optimizer import Optimizer, Settings
from .ownership import ParameterPlacement
from .schedule import Schedule
from .sinkhorn import SinkhornSettings

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
    "update_router_bias_",
    "update_router_biases_",
]
