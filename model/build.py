"""Builds a model: allocates its parameters, casts them, splits them over processes, and initialises them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from model.backbone import DeepseekV41
from model.config import ForwardOptions, LossWeights, ModelConfig
from model.engram import check_token_map, whole_token_map
from model.init import init_weights
from model.packed import empty_packed, packed_weights_aside, reserved_on_host
from model.parallel.ranks import ONE_PROCESS, Parallel, mark_shards
from model.quantize import Packing

Cast = TypeVar("Cast", bound=nn.Module)
FP32_NAMES = ("hc_attn.", "hc_ffn.", "attn_sink", "gate.bias")


def build_model(
    config: ModelConfig,
    runtime: ForwardOptions | None = None,
    token_map: Tensor | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    parallel: Parallel = ONE_PROCESS,
    loss_weights: LossWeights | None = None,
) -> DeepseekV41:
    """Build a model with freshly initialised parameters. On device "meta" no memory is allocated, so that even the
    released 552B configuration is built in seconds.

    dtype: the dtype of all parameters except those that the V4.1 report keeps in fp32 (mHC coefficients, attention
    sinks, router biases). With `parallel`, only this rank's part of the model is built; its initial weights are the
    same as in a model built by a single process. Raises ValueError if the experts cannot be split evenly.
    """
    model = allocate_model(config, runtime, token_map, device, dtype, parallel, loss_weights)
    if torch.device(device).type != "meta":
        init_weights(model, config.text.initializer_range, config.text.hc_mult, seed)
    return model


def allocate_model(
    config: ModelConfig,
    runtime: ForwardOptions | None,
    token_map: Tensor | None,
    device: str | torch.device,
    dtype: torch.dtype,
    parallel: Parallel = ONE_PROCESS,
    loss_weights: LossWeights | None = None,
    packing_of: Callable[[str], Packing | None] = lambda name: None,
) -> DeepseekV41:
    """A model whose parameters are allocated on `device` but not initialised. `packing_of` maps a parameter name to the
    quantised format in which the parameter stays in memory (see model/packed.py), or to None for an ordinary parameter.
    """
    if torch.device(device).type != "meta" or token_map is not None:
        check_token_map(config.text, token_map)
    with torch.device("meta"):
        model = DeepseekV41(config, runtime, parallel, loss_weights)
    tables_on_host = model.runtime.tables == "host" and torch.device(device).type != "meta"
    _make_room_packed(cast_model(model, dtype), packing_of, torch.device(device), tables_on_host)
    with packed_weights_aside(model):
        model.to_empty(device=device)
    mark_shards(model)
    model.token_map = None if token_map is None else whole_token_map(config.text, token_map).to(device)
    return model


def _make_room_packed(
    model: nn.Module, packing_of: Callable[[str], Packing | None], device: torch.device, tables_on_host: bool
) -> None:
    for name, parameter in list(model.named_parameters()):
        packing = packing_of(name)
        if tables_on_host and is_table(name) and packing is None:
            raise ValueError(
                "runtime.tables: 'host' needs a quantised checkpoint whose weights are kept packed and frozen, because "
                "packed Engram tables are mapped from its files; use 'device'"
            )
        if packing is not None:
            parent, _, leaf = name.rpartition(".")
            if tables_on_host and is_table(name):
                made = reserved_on_host(parameter.shape, packing, parameter.dtype)
            else:
                made = empty_packed(parameter.shape, packing, parameter.dtype, device)
            setattr(model.get_submodule(parent), leaf, made)


def is_table(name: str) -> bool:
    """Whether the parameter with this name is an Engram table."""
    return name.endswith(".engram.embed.weight")


def cast_model(model: Cast, dtype: torch.dtype) -> Cast:
    """Cast the parameters to `dtype`, except those that must stay fp32."""
    for name, tensor in model.named_parameters():
        if not any(part in name for part in FP32_NAMES):
            tensor.data = tensor.data.to(dtype)
    return model
