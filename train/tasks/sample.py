"""Continues a prompt with a model and returns the new text."""

from __future__ import annotations

from tokenizers import Tokenizer

from model import DeepseekV41
from model.generation import Request, generate


def sample(
    model: DeepseekV41,
    tokenizer: Tokenizer,
    prompt: list[int],
    *,
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | None = None,
) -> str:
    """Return the text with which ``model`` continues the tokens ``prompt``.

    Args:
        tokens: largest number of new tokens.
        temperature: 0 takes the most likely token; a higher value draws from softmax(logits / temperature).
        seed: seed for drawing tokens; the global random state is not changed.
        stop: token id that ends the text early, usually the end-of-sequence id; it is not part of the text.

    If the model is split over processes, all these processes must call this function together. The processes run the
    same number of steps, even if rounding makes them draw different tokens.
    """
    ends = frozenset() if stop is None or model.parallel.together else frozenset({stop})
    (answer,) = generate(model, [Request(tuple(prompt), tokens, temperature, seed=seed, stop=ends)])
    written = answer.tokens[: answer.tokens.index(stop)] if stop in answer.tokens else answer.tokens
    return tokenizer.decode(written, skip_special_tokens=False)
