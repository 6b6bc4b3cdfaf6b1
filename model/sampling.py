"""Samples tokens from logits with random numbers that depend only on a seed and a position, and implements the
acceptance rule of speculative decoding.

In shapes, B is the number of sequences, V the vocabulary size and n the number of drafts of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Values of the argument `purpose` of `uniform`; 0 is for drawing a token from the model
DRAFTED, ACCEPTED, REPLACED = 1, 2, 3


def uniform(seed: int, position: int, purpose: int = 0) -> float:
    """The random number in [0, 1) for a sequence's token at `position`: a hash (splitmix64) of seed and position.
    Different values of `purpose` give independent random numbers.
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
    """Draw one token for each sequence: returns tokens int64 [B] and their log-probabilities fp64 [B].

    logits fp32 [B, V]; temperature [B] (0 = greedy); top_p [B]; u fp64 [B] in [0, 1), a uniform random number for each
    row; the token is where the row's cumulative distribution reaches u. Raises FloatingPointError for NaN or infinite
    logits.
    """
    log_p = log_distribution(logits, temperature, top_p)
    drawn = _at(log_p.exp(), u.to(logits.device, torch.float64))
    tokens = torch.where((temperature == 0).to(logits.device), logits.argmax(-1), drawn)
    return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)


def log_distribution(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """The log-probabilities fp64 [B, V] from which tokens are drawn; greedy rows get the log-probabilities at
    temperature 1. Arguments and errors are as in `draw`.
    """
    cuts = bool((top_p < 1).any())  # read before the move, so usually without waiting for the device
    temperature, top_p = (x.to(logits.device, torch.float64) for x in (temperature, top_p))
    greedy = temperature == 0
    log_p = (logits.double() / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    broken = int(log_p.isnan().any(-1).sum())
    if broken:
        raise FloatingPointError(
            f"the logits of {broken} of {len(logits)} sequences contain NaN or infinity, so no token can be drawn"
        )
    if cuts:
        ranked = log_p.sort(-1, descending=True)
        p = ranked.values.exp()
        # Tokens that are not needed, because more likely tokens already reach top_p
        behind = p.cumsum(-1) - p >= top_p[:, None]
        behind[:, 0] = False
        cut = torch.zeros_like(behind).scatter(1, ranked.indices, behind) & ~greedy[:, None]
        log_p = log_p.masked_fill(cut, float("-inf")).log_softmax(-1)
    return log_p


def _at(weights: Tensor, u: Tensor) -> Tensor:
    """Returns int64 [B]: an index into each row of weights fp64 [B, V], drawn with probability proportional to its
    weight by means of the uniform random number u fp64 [B] in [0, 1).
    """
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
    """Apply the acceptance rule of speculative decoding: returns for every sequence its new tokens and their
    log-probabilities. The new tokens are the drafts before the first rejected draft, followed by one token from the
    model.

    A draft x drawn from the drafter's distribution q is accepted with probability min(1, p(x) / q(x)), where p is the
    model's distribution. A rejected draft is replaced by a token drawn from max(p - q, 0), normalised. Every token then
    has the distribution p (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). In greedy rows a draft
    is accepted if it is the model's likeliest token.

    logits fp32 [sum of (n + 1), V]: the model's logits after each sequence's last token and after each of its n drafts;
    counts: the number n of drafts of each sequence; drafts int64 [B, at least n]; draft_logits fp32 [B, at least n, V]:
    the logits that the drafts were drawn from; temperature, top_p [B] as for `draw`; places: the position of each
    sequence's next token.
    """
    device, most = logits.device, max(counts)
    number, slot = torch.tensor(counts), torch.arange(most + 1)
    start = ((number + 1).cumsum(0) - number - 1).to(device)
    owner = torch.repeat_interleave(torch.arange(len(counts)), number + 1)
    log_p, best = log_distribution(logits, temperature[owner], top_p[owner]), logits.argmax(-1)
    greedy, passed = (temperature == 0).to(device), (slot[:-1] < number[:, None]).to(device)
    drafts = drafts[:, :most]
    # the row of logits for each draft and for the token after the drafts; arbitrary at padding
    row = (start[:, None] + slot.to(device)).clamp(max=len(logits) - 1)
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
    # max(p - q, 0) is zero everywhere if p equals q up to rounding; then draw from p
    weights = torch.where((rejected & left.any(1))[:, None], left, weights)
    own, replaced = (_numbers(seeds, places, most + 1, purpose).to(device) for purpose in (0, REPLACED))
    u = torch.where(rejected[:, None], replaced, own).gather(1, accepted[:, None]).squeeze(1)
    end = torch.where(greedy, best[last], _at(weights, u))
    tokens = torch.cat([drafts, end[:, None]], dim=1).scatter(1, accepted[:, None], end[:, None])
    found = log_p[row.flatten(), tokens.flatten()].view(tokens.shape)
    lists = zip(tokens.tolist(), found.tolist(), (accepted + 1).tolist(), strict=True)
    return [(t[:n], p[:n]) for t, p, n in lists]


def _numbers(seeds: Sequence[int], places: Sequence[int], count: int, purpose: int) -> Tensor:
    """Returns fp64 [B, count]: the random numbers of `uniform` at `count` positions of each sequence, starting at the
    position in `places`.
    """
    rows = [
        [uniform(seed, place + n, purpose) for n in range(count)] for seed, place in zip(seeds, places, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), count)
