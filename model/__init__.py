"""The V4.1 model: configuration, backbone, checkpoints. Start reading in `backbone.py`."""

from model.backbone import DeepseekV41, LossDenominators, Losses, Output, build_model, indexer_recall
from model.checkpoint.checkpoint import convert_checkpoint, load_pretrained, load_weights, save_pretrained
from model.checkpoint.merge import merge_checkpoints, open_folder
from model.config import ForwardOptions, LossWeights, ModelConfig, TextConfig, VisionConfig
from model.dspark import Draft, Drafted, Drafter, DraftLoss, DraftObjective, build_drafter, load_drafter
from model.generate import Generator, Request, Sample, generate
from model.loss import Objective, reverse_kl, token_log_probs

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
