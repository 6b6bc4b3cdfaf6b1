"""A second, frozen policy beside the trained one (the reference), and its log-probabilities for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from model import DeepseekV41, ForwardOptions, ModelConfig, token_log_probs
from model.build import allocate_model
from model.engram import build_token_map
from model.parallel.ranks import ONE_PROCESS, Parallel
from train.build import Run
from train.checkpoint.init_from import find_pretrained, frozen_packing, load_pretrained_weights, token_parts
from train.config.problems import ConfigError, problem


class Copy:
    """A reference policy that is a frozen copy of the model."""

    def __init__(self, model: DeepseekV41):
        self._model = model

    @contextmanager
    def model(self) -> Iterator[DeepseekV41]:
        yield self._model


class BaseModel:
    """The reference policy of a LoRA run: the model without its adapter.

    A LoRA run also changes the router biases, so this class stores their initial values.
    """

    def __init__(self, model: DeepseekV41):
        self._model = model
        self._biases = [bias.clone() for pair in model.router_biases() for bias in pair]

    @contextmanager
    def model(self) -> Iterator[DeepseekV41]:
        from train.lora import inject  # imported here since the import takes seconds

        biases = [bias for pair in self._model.router_biases() for bias in pair]
        now = [bias.clone() for bias in biases]
        training = self._model.training
        self._model.eval()
        with inject.without_adapter(self._model):
            self._set(biases, self._biases)
            try:
                yield self._model
            finally:
                self._set(biases, now)
                self._model.train(training)

    @staticmethod
    def _set(biases: list[Tensor], values: list[Tensor]) -> None:
        for bias, value in zip(biases, values, strict=True):
            bias.copy_(value)


Reference = Copy | BaseModel


def check_teacher(run: Run, key: str, name: str, learner: str) -> None:
    """Raise ``ConfigError`` if the checkpoint ``name`` has another tokenizer or another vocabulary size than the model
    that is trained.

    key: the setting that names the checkpoint. learner: the word for the trained model in the message.
    """
    origin, rule = find_pretrained(name), None
    size, own = ModelConfig.from_dict(origin.model).text.vocab_size, run.model_config.text.vocab_size
    if token_parts(Tokenizer.from_file(str(origin.tokenizer)).to_str()) != token_parts(run.tokenizer.to_str()):
        rule = f"its tokenizer, {origin.tokenizer}, differs from the tokenizer of the {learner}"
    elif size != own:
        rule = f"its vocabulary has {size} entries, but the {learner}'s has {own}"
    if rule:
        remedy = f"Use a teacher with the {learner}'s tokenizer and vocabulary size"
        raise ConfigError([problem(key, name, rule, remedy)])


def load_teacher(run: Run, name: str, parallel: Parallel = ONE_PROCESS) -> DeepseekV41:
    """Load a teacher with ``load_frozen``. The teacher's weights are used as they are stored, even if the student's
    weights are rounded (by options such as ``runtime.expert_quant``).
    """
    return load_frozen(run, name, parallel, run.config.runtime.without_weight_rounding())


def load_frozen(
    run: Run, name: str, parallel: Parallel = ONE_PROCESS, runtime: ForwardOptions | None = None
) -> DeepseekV41:
    """Load the model of a checkpoint as a frozen model.

    The weights of the loaded model stay packed in memory if the checkpoint stores quantised weights and
    ``runtime.frozen`` is "packed".

    Args:
        name: the checkpoint, named as in ``init_from``.
        parallel: how the model is split over processes; the processes that share a split model must run it together.
        runtime: options of the model's forward pass; None means the options of the run.
    """
    origin = find_pretrained(name)
    config = ModelConfig.from_dict(origin.model)
    token_map = build_token_map(run.tokenizer) if config.text.engram_layer_ids else None
    dtype = torch.bfloat16 if run.config.parallel.precision == "bf16" else torch.float32
    kept = frozen_packing(origin, run.config.runtime.frozen)
    options = runtime or run.config.runtime
    model = allocate_model(config, options, token_map, run.device, dtype, parallel, packing_of=kept)
    load_pretrained_weights(model, name)
    return model.requires_grad_(False)


# The entries of a batch that ``model.losses`` takes.
INPUTS = (
    "input_ids",
    "labels",
    "attention_mask",
    "seq_lens",
    "prompt_lens",
    "routing",
    "pixel_values",
    "image_grid_hws",
    "vision_token_types",
    "layout",  # else `model.losses` computes it, which reads the batch from the device
)


@torch.no_grad()
def log_probs_under(
    model: DeepseekV41, batch: Mapping[str, Any], temperature: float = 1.0, routing_replay: bool = False
) -> Tensor:
    """Compute the log-probability of every supervised token under ``model``, fp32 [B, S].

    routing_replay: use the experts that were recorded when the tokens were generated, instead of the router's choice.
    """
    inputs = {name: batch[name] for name in INPUTS if name in batch and (routing_replay or name != "routing")}
    found = torch.zeros(batch["labels"].shape, device=batch["labels"].device)

    def objective(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        log_probs, _ = token_log_probs(hidden / temperature, weight, targets)
        found.view(-1)[places] = log_probs.float()
        return log_probs.sum()

    model.losses(**inputs, denominators=model.loss_denominators(**inputs), objective=objective)
    return found
