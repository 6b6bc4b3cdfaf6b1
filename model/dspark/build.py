"""Builds a drafter, newly initialised or from a checkpoint folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from model.backbone import DeepseekV41
from model.build import allocate_model, cast_model
from model.checkpoint.load import load_weights
from model.checkpoint.names import released_tensors
from model.checkpoint.released import read_headers
from model.config import ModelConfig, drafter_problems
from model.dspark.drafter import Drafter
from model.init import init_weights
from model.parallel.ranks import mark_shards
from model.rope import inverse_frequencies


def build_drafter(backbone: DeepseekV41, seed: int = 0) -> Drafter:
    """Build a newly initialised drafter on the device and in the dtype of the backbone. Raises ValueError that lists
    the missing or invalid drafter settings in the configuration.
    """
    drafter, text = allocate_drafter(backbone), backbone.config.text
    if backbone.embed.weight.device.type != "meta":
        init_weights(drafter, text.initializer_range, text.hc_mult, seed)
    return drafter


def allocate_drafter(backbone: DeepseekV41) -> Drafter:
    """Build a drafter with uninitialised parameters on the device of the backbone."""
    problems = [f"text_config.{problem}" for problem in drafter_problems(backbone.config.text)]
    if problems:
        raise ValueError("this configuration does not describe a drafter:\n  " + "\n  ".join(problems))
    with torch.device("meta"):
        drafter = Drafter(backbone)
    drafter.frequencies = inverse_frequencies(backbone.config.text, compressed=False)
    weight = backbone.embed.weight
    drafter = cast_model(drafter, weight.dtype).to_empty(device=weight.device)
    mark_shards(drafter)
    return drafter


def load_drafter(folder: str | Path, backbone: DeepseekV41) -> Drafter:
    """Load the drafter of a checkpoint folder (tensors `mtp.*`, quantised, bf16 or fp32). `backbone` must have been
    loaded from the same folder.

    Raises FileNotFoundError for a missing file, ValueError for a folder without a drafter or with another backbone, and
    ValueError that lists every tensor that is missing, unexpected or of the wrong shape or dtype.
    """
    folder = Path(folder)
    config = ModelConfig.load(folder)
    if not any(name.startswith("mtp.") for name in read_headers(folder)):
        raise ValueError(f"{folder} contains no drafter: it has no tensor with a name mtp.*")
    # the number of Engram rows, which an export also writes, is not compared because it follows from other keys
    if len({replace(text, engram_num_embeddings=()) for text in (config.text, backbone.config.text)}) > 1:
        raise ValueError(
            f"{folder / 'config.json'}: text_config differs from that of the backbone given for the drafter"
        )
    drafter = allocate_drafter(backbone)
    skeleton = allocate_model(config, None, None, "meta", torch.float32)
    load_weights(drafter, folder, beside=list(released_tensors(skeleton)))
    return drafter
