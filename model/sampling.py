"""Tokens from logits: draws that depend only on a seed and a position, and which of a drafter's proposals are kept.

Shapes: B sequences, V vocabulary, n drafts of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DRAFTED, ACCEPTED, REPLACED = 1, 2, 3  # purposes of numbers beside the one that a token is drawn with


def uniform(seed: int, position: int, purpose: int = 0) -> float:
    """The number in [0, 1) for drawing a sequence's token at `position`: a hash (splitmix64) of seed and position.
    Other purposes give other numbers.
    """
    start = _mixed(seed)
    if purpose:
        start = _mixed(start + purpose)
    return _mixed(start + position) / 2**64


def _mixed(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities fp64 [B].

    logits fp32 [B, V]; temperature [B] (0 = greedy), top_p [B], u fp64 [B] in [0, 1): each row's place in its
    cumulative distribution. Raises FloatingPointError if a row is no distribution.
    """
    log_p = log_distribution(logits, temperature, top_p)
    drawn = _at(log_p.exp(), u.to(logits.device, torch.float64))
    tokens = torch.where((temperature == 0).to(logits.device), logits.argmax(-1), drawn)
    return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)


def log_distribution(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """fp64 [B, V] that tokens are drawn from; of greedy rows that of temperature 1. As for `draw`."""
    temperature, top_p = (x.to(logits.device, torch.float64) for x in (temperature, top_p))
    greedy = temperature == 0
    log_p = (logits.double() / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    broken = int(log_p.isnan().any(-1).sum())
    if broken:
        raise FloatingPointError(
            f"the logits of {broken} of {len(logits)} sequences hold NaN or infinity; no token can be drawn"
        )
    if bool((top_p < 1).any()):
        ranked = log_p.sort(-1, descending=True)
        p = ranked.values.exp()
        behind = p.cumsum(-1) - p >= top_p[:, None]  # enough without this one; never the first
        behind[:, 0] = False
        cut = torch.zeros_like(behind).scatter(1, ranked.indices, behind) & ~greedy[:, None]
        log_p = log_p.masked_fill(cut, float("-inf")).log_softmax(-1)
    return log_p


def _at(weights: Tensor, u: Tensor) -> Tensor:
    """int64 [B]: where u fp64 [B] in [0, 1) falls among weights fp64 [B, V] that need not sum to 1."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = (u[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def verify(
    logits: Tensor,
    counts: Sequence[int],
    drafts: Tensor,
    draft_logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    seeds: Sequence[int],
    places: Sequence[int],
) -> list[tuple[list[int], list[float]]]:
    """Of every sequence the tokens that it goes on with, and their log-probabilities: its drafts up to the first that
    is rejected, then one token of the model's own.

    A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)), p being what the model would draw from;
    in the place of a rejected one comes a token from max(p - q, 0), normalised. So every token has the distribution p
    (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Greedy: a draft is accepted if it is the
    likeliest token.

    logits fp32 [sum of n + 1, V]: behind each sequence's last token and each of its n drafts, counts: n. drafts int64
    [B, at least n], draft_logits fp32 of these. temperature, top_p [B] as for `draw`. places: of the next tokens.
    """
    device, most = logits.device, max(counts)
    number, slot = torch.tensor(counts), torch.arange(most + 1)
    start = ((number + 1).cumsum(0) - number - 1).to(device)
    owner = torch.repeat_interleave(torch.arange(len(counts)), number + 1)
    log_p, best = log_distribution(logits, temperature[owner], top_p[owner]), logits.argmax(-1)
    greedy, passed = (temperature == 0).to(device), (slot[:-1] < number[:, None]).to(device)
    drafts = drafts[:, :most]
    row = (start[:, None] + slot.to(device)).clamp(max=len(logits) - 1)  # of each draft; behind them: anything
    log_q = log_distribution(
        draft_logits[:, :most].flatten(0, 1), *(x.repeat_interleave(most) for x in (temperature, top_p))
    )
    log_q = log_q.view(*drafts.shape, logits.shape[1])
    mine = log_p[row[:, :-1].flatten(), drafts.flatten()].view(drafts.shape)
    ratio = (mine - log_q.gather(2, drafts[:, :, None]).squeeze(2)).exp()
    u = _numbers(seeds, places, most, ACCEPTED).to(device) < ratio
    accepted = (torch.where(greedy[:, None], best[row[:, :-1]] == drafts, u) & passed).cumprod(1).sum(1)
    last = start + accepted
    rejected = accepted < number.to(device)
    weights = log_p[last].exp()
    at = accepted.clamp(max=max(most - 1, 0))
    left = (weights - log_q[torch.arange(len(counts), device=device), at].exp()).clamp(min=0) if most else weights
    # nothing is left where p is q but for rounding
    weights = torch.where((rejected & left.any(1))[:, None], left, weights)
    own, replaced = (_numbers(seeds, places, most + 1, purpose).to(device) for purpose in (0, REPLACED))
    u = torch.where(rejected[:, None], replaced, own).gather(1, accepted[:, None]).squeeze(1)
    end = torch.where(greedy, best[last], _at(weights, u))
    tokens = torch.cat([drafts, end[:, None]], dim=1).scatter(1, accepted[:, None], end[:, None])
    found = log_p[row.flatten(), tokens.flatten()].view(tokens.shape)
    lists = zip(tokens.tolist(), found.tolist(), (accepted + 1).tolist(), strict=True)
    return [(t[:n], p[:n]) for t, p, n in lists]


def _numbers(seeds: Sequence[int], places: Sequence[int], count: int, purpose: int) -> Tensor:
    """fp64 [B, count]: `uniform` of each sequence's next places."""
    rows = [
        [uniform(seed, place + n, purpose) for n in range(count)] for seed, place in zip(seeds, places, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), count)
