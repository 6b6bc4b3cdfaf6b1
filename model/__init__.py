"""The V4.1 model: forward, losses, generation, checkpoints. Imports no other package of the project.

Read backbone.py first (the whole forward), then attention.py, indexer.py, sparse.py, moe.py, hyper.py, engram.py,
vision.py; layout.py and quantize.py when a shape or a rounding is unclear; training_losses.py and loss.py; build.py and
init.py; the packages parallel, cache and checkpoint; generate.py and dspark.py.

A file imports only from lines above its own:
    config
    precision, norm, rope, quantize, init, parallel, kernels
    layout, hyper, loss, sparse
    indexer, moe, engram, vision
    cache
    attention, training_losses
    backbone
    build, recall, count
    checkpoint
    generate, dspark
    huggingface
"""

from model.backbone import DeepseekV41, Output
from model.build import build_model
from model.checkpoint.convert import convert_checkpoint
from model.checkpoint.load import load_pretrained, load_weights
from model.checkpoint.merge import merge_checkpoints, open_folder
from model.checkpoint.save import save_pretrained
from model.config import ForwardOptions, LossWeights, ModelConfig, TextConfig, VisionConfig
from model.dspark import Draft, Drafted, Drafter, DraftLoss, DraftObjective, build_drafter, load_drafter
from model.generate import Generator, Request, Sample, generate
from model.loss import Objective, reverse_kl, token_log_probs
from model.recall import indexer_recall
from model.training_losses import LossDenominators, Losses

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
