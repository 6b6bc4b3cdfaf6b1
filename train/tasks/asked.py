"""Loads a model and its tokenizer, and answers prompts as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from data.chat.conversation import effort_budget
from data.chat.prompt import Prompt, read_prompt
from data.images import VisionSettings
from data.progress import progress
from data.tokenizer import read_tokenizer, special_ids
from model import DeepseekV41, Drafter, ModelConfig, Request, build_model, load_drafter, load_pretrained
from model.engram import build_token_map
from model.generation import Sample
from train.checkpoint.init_from import find_pretrained, forward_options, holds_drafter, load_pretrained_weights
from train.config.schema import Asked
from train.distributed.world import World, pick_device

END_THINK = "</think>"


@dataclass(frozen=True)
class Model:
    """A loaded model with its tokenizer.

    drafter: the drafter that the checkpoint contains, or None. A drafter speeds up generation without changing answers.
    """

    model: DeepseekV41
    tokenizer: Tokenizer
    drafter: Drafter | None

    @property
    def eos(self) -> int:
        return special_ids(self.tokenizer).eos

    @property
    def vision(self) -> VisionSettings | None:
        """Settings for cutting images into patches; None if the model has no vision tower."""
        settings = self.model.config.vision
        return None if settings is None else VisionSettings.from_config(asdict(settings))


def open_model(config: Asked) -> Model:
    """Load the model that ``config.init_from`` names.

    Raises:
        ValueError: the checkpoint cannot be used, or ``config.effort`` is not a valid effort.
    """
    effort_budget(config.effort)
    return open_checkpoint(config.init_from, World(pick_device(config.device)))


def open_checkpoint(name: str, world: World) -> Model:
    """Load the model of the checkpoint ``name`` (in the notation of ``init_from``), or this process's part of that
    model.

    Raises ValueError if the checkpoint cannot be used.
    """
    origin, device, parallel = find_pretrained(name), world.device, world.parallel
    tokenizer = read_tokenizer(origin.tokenizer)
    if (origin.folder / "config.json").is_file():
        with progress("loading weights", 1.0, shared=True) as done:
            model = load_pretrained(origin.folder, device=device, parallel=parallel, done=done)
    else:
        settings = ModelConfig.from_dict(origin.model)
        token_map = build_token_map(tokenizer) if settings.text.engram_layer_ids else None
        runtime = forward_options(origin)  # a model answers by the rounding that it was trained with
        model = build_model(settings, runtime, token_map, device=device, parallel=parallel)
        load_pretrained_weights(model, name)
    drafter = load_drafter(origin.folder, model) if holds_drafter(origin.folder) else None
    return Model(model.eval(), tokenizer, drafter)


def check_length(asked: Model, config: Asked, prompt: Prompt) -> None:
    """Raise ValueError if a prompt and an answer of ``max_tokens`` exceed the model's context length."""
    limit = asked.model.config.text.max_position_embeddings
    if len(prompt.ids) + config.max_tokens > limit:
        raise ValueError(
            f"the prompt ({len(prompt.ids):,} tokens) and max_tokens = {config.max_tokens:,} exceed the model's "
            f"context length of {limit:,} tokens; lower max_tokens or shorten the conversation"
        )


def request(asked: Model, config: Asked, prompt: Prompt, seed: int) -> Request:
    """Make a request for an answer to a prompt, and decode the prompt's images.

    Raises:
        ValueError: prompt and answer exceed the model's context length.
        DataError: an image is damaged.
    """
    check_length(asked, config, prompt)
    images = prompt.images()
    plain = Request(prompt.ids, config.max_tokens, config.temperature, config.top_p, seed, frozenset({asked.eos}))
    return plain if images is None else replace(plain, images=images)


def conversation(asked: Model, config: Asked, record: dict[str, Any], file: str = "messages", line: int = 0) -> Prompt:
    """Make the prompt for the next answer in a record's conversation.

    A system prompt, ``thinking`` and ``effort`` are taken from the configuration if the record does not give them.
    Image paths in the record are relative to the folder of ``file``.

    Raises:
        DataError: the conversation is malformed, or it has an image and the model has no vision tower.
    """
    messages = record["messages"]
    if config.system and messages and messages[0].get("role") not in ("system", "developer"):
        messages = [{"role": "system", "content": config.system}, *messages]
    record = {"thinking": config.thinking, "effort": config.effort, **record, "messages": messages}
    return read_prompt(asked.tokenizer, record, asked.vision, file, line)


def texts(asked: Model, sample: Sample, thinking: bool) -> dict[str, str]:
    """Decode a sample to text: its answer, and its reasoning if ``thinking`` is on."""
    tokens = [token for token in sample.tokens if token != asked.eos]
    end = asked.tokenizer.token_to_id(END_THINK)
    if not thinking:
        return {"answer": asked.tokenizer.decode(tokens, skip_special_tokens=False)}
    cut = tokens.index(end) if end in tokens else len(tokens)
    parts = {"reasoning": tokens[:cut], "answer": tokens[cut + 1 :]}
    return {name: asked.tokenizer.decode(part, skip_special_tokens=False) for name, part in parts.items()}
