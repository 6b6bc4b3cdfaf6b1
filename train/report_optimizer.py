"""The V4.1 report's optimizer for the `Trainer` of transformers and the trainers of TRL:

Trainer(..., optimizer_cls_and_kwargs=(ReportOptimizer, {"lr": 2e-4}))
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from model import DeepseekV41
from optim import Optimizer, Settings
from train.param_groups import VISION_SCHEDULE, adapter_rules, groups_of, report_rules


class ReportOptimizer:
    """The optimizer factory to pass as first item of a trainer's `optimizer_cls_and_kwargs`. The trainer calls the
    factory with its model, so a trainer that loads its model from a path works too.
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
        """Return the optimizer that ``python -m train optim=report`` uses for the trained parameters: Muon (head by
        head), Sinkhorn-balanced momentum and AdamW. The factors of a LoRA adapter are trained by AdamW alone.

        The weight decay is that of the V4.1 report, not the trainer's. The trainer's scheduler multiplies the learning
        rates of all parameter groups; the vision tower is trained from the first step. The arguments after lr are those
        of `report_rules`, and the settings of the optimizer methods. Raises ValueError if the model is not one of this
        project.
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
    """An `Optimizer` whose learning rates are set by a torch scheduler. The scheduler stores the rates in the parameter
    groups, so loading a state also restores the learning rates.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = {name: group for group in state_dict["param_groups"] for name in group["names"]}
        for group in self.param_groups:
            of_group = saved[group["names"][0]]
            group.update({key: of_group[key] for key in ("lr", "initial_lr") if key in of_group})
