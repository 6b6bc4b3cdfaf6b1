"""How `DeepseekV41ForCausalLM.generate` decodes with a drafter: by `model/generation.py`, in place of transformers' own
loop.

Speculative decoding knows temperature and top-p, end tokens and lengths. Everything else that `generate` offers (beams,
top-k, penalties, streamers, scores, images) is left to transformers, without a drafter.
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
    """What in the arguments of a `generate` call speculative decoding does not know, in the words of the caller: names
    of arguments, or of the classes of processors and criteria. inputs: the model's inputs beside token ids and mask.
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
    """Rows int64 [B, S] of prompts, padded on the left, continued to [B, longest]: what `generate` returns. Rows that
    end earlier are filled with the padding token.

    Without `do_sample` rows are greedy. Draws depend on one seed a row, taken from torch's CPU generator. Raises
    ValueError for a row that is all padding.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [tuple(ids[real.bool()].tolist()) for ids, real in zip(input_ids, mask, strict=True)]
    if () in prompts:
        raise ValueError(f"attention_mask row {prompts.index(())} has no real token; begin it with BOS")
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
