"""The V4.1 model: its forward pass, losses, generation and checkpoints. It imports no other package of the project.

Read backbone.py first (the whole forward pass), then attention.py, indexer.py, sparse.py, moe.py, hyper.py, engram.py,
and vision.py. Read layout.py and quantize.py when a shape or a rounding is unclear. Then come training_losses.py and
loss.py, build.py and init.py, the packages parallel, cache, checkpoint and dspark, sampling.py and generation.py, and
the package huggingface.

In the list below, each file imports only from the lines above it (and from its own package):
    kernels.switch
    config
    no_wait, precision, summed_gradients, kernels
    norm, rope, quantize, init
    packed
    parallel, layout, chunk, hyper, loss, sparse
    rounding
    indexer, moe, engram, vision
    cache
    attention, training_losses, offload, recomputation
    backbone
    build, recall, count
    checkpoint
    sampling, dspark
    generation
    placement
    huggingface

The names that the package exports are imported lazily, so that reading a configuration does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.backbone import DeepseekV41, Output
    from model.build import build_model
    from model.checkpoint.convert import convert_checkpoint
    from model.checkpoint.load import load_pretrained, load_weights
    from model.checkpoint.merge import merge_checkpoints, open_folder
    from model.checkpoint.save import save_pretrained
    from model.config import DraftObjective, ForwardOptions, LossWeights, ModelConfig, TextConfig, VisionConfig
    from model.dspark import Draft, Drafted, Drafter, DraftLoss, build_drafter, load_drafter
    from model.generation import Generator, Request, Sample, generate
    from model.loss import Objective, cross_entropy_sum, forward_kl, reverse_kl, token_log_probs
    from model.recall import indexer_recall
    from model.training_losses import LossDenominators, Losses

_HOME = {
    "DeepseekV41": "model.backbone",
    "Draft": "model.dspark",
    "DraftLoss": "model.dspark",
    "DraftObjective": "model.config",
    "Drafted": "model.dspark",
    "Drafter": "model.dspark",
    "ForwardOptions": "model.config",
    "Generator": "model.generation",
    "LossDenominators": "model.training_losses",
    "LossWeights": "model.config",
    "Losses": "model.training_losses",
    "ModelConfig": "model.config",
    "Objective": "model.loss",
    "Output": "model.backbone",
    "Request": "model.generation",
    "Sample": "model.generation",
    "TextConfig": "model.config",
    "VisionConfig": "model.config",
    "build_drafter": "model.dspark",
    "build_model": "model.build",
    "convert_checkpoint": "model.checkpoint.convert",
    "cross_entropy_sum": "model.loss",
    "forward_kl": "model.loss",
    "generate": "model.generation",
    "indexer_recall": "model.recall",
    "load_drafter": "model.dspark",
    "load_pretrained": "model.checkpoint.load",
    "load_weights": "model.checkpoint.load",
    "merge_checkpoints": "model.checkpoint.merge",
    "open_folder": "model.checkpoint.merge",
    "reverse_kl": "model.loss",
    "save_pretrained": "model.checkpoint.save",
    "token_log_probs": "model.loss",
}

__all__ = [
    "DeepseekV41",
    "Draft",
    "DraftLoss",
    "DraftObjective",
    "Drafted",
    "Drafter",
    "ForwardOptions",
    "Generator",
    "LossDenominators",
    "LossWeights",
    "Losses",
    "ModelConfig",
    "Objective",
    "Output",
    "Request",
    "Sample",
    "TextConfig",
    "VisionConfig",
    "build_drafter",
    "build_model",
    "convert_checkpoint",
    "cross_entropy_sum",
    "forward_kl",
    "generate",
    "indexer_recall",
    "load_drafter",
    "load_pretrained",
    "load_weights",
    "merge_checkpoints",
    "open_folder",
    "reverse_kl",
    "save_pretrained",
    "token_log_probs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
