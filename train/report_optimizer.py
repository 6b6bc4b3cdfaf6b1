"""The report's optimizer methods under transformers' `Trainer` and TRL's trainers:

Trainer(..., optimizer_cls_and_kwargs=(ReportOptimizer, {"lr": 2e-4}))
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from model import DeepseekV41
from optim import Optimizer, Settings
from train.param_groups import VISION_SCHEDULE, adapter_rules, groups_of, report_rules


class ReportOptimizer:
    """What `optimizer_cls_and_kwargs` takes as its first part: called with the trainer's model, it makes the optimizer.
    So it also works with a trainer that loads its model from a path.
    """

    def __call__(
        self,
        model: nn.Module,
        lr: float,
        per_head: bool = True,
        tables: Literal["sinkhorn", "adamw"] = "sinkhorn",
        tables_lr_factor: float = 1.0,
        engram_lr_factor: float = 5.0,
        settings: Settings | None = None,
    ) -> Optimizer:
        """The optimizer that ``python -m train optim=report`` uses, for the parameters that are trained: Muon (head by
        head), Sinkhorn-balanced momentum, AdamW; for the factors of an adapter AdamW alone.

        The weight decay is the report's, not the trainer's. A scheduler of the trainer multiplies the rates of all
        groups; the vision tower is trained from the first step. The arguments after lr are those of `report_rules` and
        the methods' settings. Raises ValueError if the model is none of this project.
        """
        core = next((module for module in model.modules() if isinstance(module, DeepseekV41)), None)
        if core is None:
            raise ValueError("ReportOptimizer: the trainer's model is no DeepseekV41ForCausalLM")
        if any("lora_" in name and p.requires_grad for name, p in core.named_parameters()):
            rules = adapter_rules()
        else:
            rules = report_rules(
                core.config,
                per_head=per_head,
                tables=tables,
                tables_lr_factor=tables_lr_factor,
                engram_lr_factor=engram_lr_factor,
            )
        optimizer = _Scheduled(groups_of(core, rules), settings)
        optimizer.set_lr(lr, {VISION_SCHEDULE: 1.0})
        return optimizer


class _Scheduled(Optimizer):
    """An `Optimizer` whose learning rates belong to a scheduler of torch, which keeps them in the groups: they are
    restored with the state.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = {name: group for group in state_dict["param_groups"] for name in group["names"]}
        for group in self.param_groups:
            of_group = saved[group["names"][0]]
            group.update({key: of_group[key] for key in ("lr", "initial_lr") if key in of_group})
