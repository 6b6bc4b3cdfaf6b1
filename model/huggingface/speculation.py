"""Speculative decoding for `DeepseekV41ForCausalLM.generate`: with a drafter, model/generation.py replaces the decoding
loop of transformers.

Speculative decoding supports temperature, top-p, end tokens and maximum lengths. With any other option of `generate`
(beams, top-k, penalties, streamers, scores, images), the loop of transformers runs without a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from model.dspark import Drafter
from model.generation import Request, generate

_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate")


def hindrances(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    inputs: dict[str, Any],
) -> list[str]:
    """Returns the names of everything in a `generate` call that speculative decoding does not support: names of
    arguments, and class names of processors and criteria. inputs: the inputs of the model besides token ids and mask.
    """

    def unknown() -> Iterator[str]:
        for processor in processors:
            exact = isinstance(processor, TopPLogitsWarper) and processor.min_tokens_to_keep == 1
            if not (exact or isinstance(processor, TemperatureLogitsWarper)):
                yield "top_k" if type(processor).__name__ == "TopKLogitsWarper" else type(processor).__name__
        for criterion in criteria:
            if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria)):
                yield type(criterion).__name__
        yield from (name for name in _KEPT if getattr(config, name))
        if config.use_cache is False:
            yield "use_cache=False"
        if streamer is not None:
            yield "streamer"
        for name in ("pixel_values", "vision_token_types"):
            if inputs.get(name) is not None:
                yield name

    return list(unknown())


def continued(
    drafter: Drafter,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> Tensor:
    """Continue the prompts input_ids int64 [B, S], which are padded on the left, by speculative decoding. Returns the
    token ids of prompts and continuations, int64 [B, longest], as `generate` does; rows that end earlier are filled
    with the padding token.

    Without `do_sample`, decoding is greedy. Sampling uses one seed per row, drawn from torch's CPU generator. Raises
    ValueError for a row with only padding.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [tuple(ids[real.bool()].tolist()) for ids, real in zip(input_ids, mask, strict=True)]
    if () in prompts:
        raise ValueError(
            f"attention_mask row {prompts.index(())} has only padding; it needs at least one token, such as BOS"
        )
    vocabulary = drafter.config.text.vocab_size
    ends = [t for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.flatten().tolist()]
    stop = frozenset(token for token in ends if 0 <= token < vocabulary)
    temperature, top_p = (1.0 if config.do_sample else 0.0), 1.0
    for processor in processors:
        if isinstance(processor, TemperatureLogitsWarper):
            temperature = float(processor.temperature)
        elif isinstance(processor, TopPLogitsWarper):
            top_p = float(processor.top_p)
    seeds = torch.randint(2**62, (len(prompts),)).tolist() if config.do_sample else [0] * len(prompts)
    new = config.max_length - input_ids.shape[1]
    requests = [Request(p, new, temperature, top_p, seed, stop) for p, seed in zip(prompts, seeds, strict=True)]
    samples = generate(drafter.backbone, requests, drafter=drafter, max_running=len(requests))
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    longest = max(len(sample.tokens) for sample in samples)
    added = [sample.tokens + [pad] * (longest - len(sample.tokens)) for sample in samples]
    return torch.cat([input_ids, torch.tensor(added, device=input_ids.device)], dim=1)
