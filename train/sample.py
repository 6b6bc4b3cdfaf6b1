"""Continue a prompt by running the whole sequence again for every new token: simple, and independent of any cache."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer


@torch.no_grad()
def sample(
    model: torch.nn.Module,
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
        tokens: how many new tokens at most.
        temperature: 0 takes the likeliest token, anything above draws from softmax(logits / temperature).
        seed: of the draw; the global random state is left alone.
        stop: token id that ends the text early, usually the end-of-sequence id.
    """
    device = next(model.parameters()).device
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits = model(input_ids=torch.tensor([ids], device=device)).logits[0, -1].float().cpu()
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == stop:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)
