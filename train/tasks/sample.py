"""Continue a prompt: tokens in, text out."""

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
    """The text that ``model`` writes after the tokens ``prompt``.

    Args:
        tokens: the most new tokens.
        temperature: 0 takes the most likely token, anything above draws from softmax(logits / temperature).
        seed: of the draw; the global random state is not touched.
        stop: token id that ends the text early, usually the end-of-sequence id; it is not part of the text.

    If the model is split over processes, all of them must call this. They run equally many steps, even if rounding
    makes them draw different tokens.
    """
    ends = frozenset() if stop is None or model.parallel.together else frozenset({stop})
    (answer,) = generate(model, [Request(tuple(prompt), tokens, temperature, seed=seed, stop=ends)])
    written = answer.tokens[: answer.tokens.index(stop)] if stop in answer.tokens else answer.tokens
    return tokenizer.decode(written, skip_special_tokens=False)
