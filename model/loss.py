"""Losses that are computed over chunks of tokens, so that the [T, vocab] logits are never all in memory during
training.

`cross_entropy_sum` is the loss of training on text. `token_log_probs`, `reverse_kl` and `forward_kl` return a value for
every position, for objectives that weight, clip or mask single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from model.parallel.ranks import Shard
from model.parallel.tables import gather_rows, sum_rows
from model.precision import without_autocast

CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}


class Objective(Protocol):
    """The interface of a function that replaces the cross-entropy. It returns the sum of a loss over the supervised
    positions of a batch, 0-d, which is later divided by the number of supervised targets in the step.

    hidden [R, d]: hidden states after the final norm; weight [V, d]: the whole output head; targets int64 [R]; places
    int64 [R]: the positions of the targets in the flattened batch, so `x.flatten()[places]` is the value of a tensor x
    [B, S] at each target.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor: ...


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, shard: Shard | None = None) -> Tensor:
    """The sum of cross-entropies in nats, 0-d fp32, between the logits hidden [R, d] @ weight [V, d]^T and the targets
    int64 [R].

    Logits are computed in the dtype of hidden and reduced in fp32, one chunk at a time, together with their gradients.
    With `shard`, `weight` has only these rows of the output head, and all ranks must run the forward and the backward
    pass together. The function gathers the rows in the dtype of hidden and sums their gradient over the ranks in fp32.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, shard)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, shard: Shard | None) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        cast = weight.to(hidden.dtype)
        if shard is not None:
            cast = gather_rows(cast, shard)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_padded = torch.zeros_like(cast, dtype=torch.float32) if need_weight else None
        if shard is not None:
            cast = cast[: shard.total]
        d_weight = d_padded[: len(cast)] if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, cast):
            logits = _logits(hidden[rows], cast).float()
            goal = targets[rows, None]
            log_norm = logits.logsumexp(-1, keepdim=True)
            total += (log_norm - logits.gather(1, goal)).sum()
            if not (need_hidden or need_weight):
                continue
            d_logits = logits.sub_(log_norm).exp_()
            d_logits.scatter_add_(1, goal, torch.full_like(log_norm, -1.0))
            d_logits = d_logits.to(hidden.dtype)
            if need_hidden:
                d_hidden[rows] = d_logits @ cast
            if need_weight:
                d_weight += d_logits.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_padded.to(weight.dtype) if need_weight else None)
        ctx.shard = shard
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        d_hidden, d_weight = ctx.saved_tensors
        if d_weight is not None:
            d_weight = d_weight * grad.to(d_weight.dtype)
            if ctx.shard is not None:
                d_weight = sum_rows(d_weight, ctx.shard)
        return d_hidden * grad.to(d_hidden.dtype) if d_hidden is not None else None, d_weight, None, None


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of the target and the entropy of the distribution, both in nats, at every position, fp32 [R]
    (fp64 for fp64 input).

    The log-probabilities are differentiable, the entropies are detached. Shapes are as in `cross_entropy_sum`. The
    backward pass computes the logits again.
    """
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, targets)
    return log_probs, entropy


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        cast = weight.to(hidden.dtype)
        log_probs = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
        entropy, log_norm = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], cast)
            log_norm[rows] = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_norm[rows]
            logits -= log_norm[rows, None]
            entropy[rows] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_norm)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        hidden, weight, targets, log_norm = ctx.saved_tensors

        def d_logits(rows: slice, logits: Tensor) -> Tensor:
            logits = logits.sub_(log_norm[rows, None]).exp_().mul_(-grad[rows, None])
            return logits.scatter_add_(1, targets[rows, None], grad[rows, None])

        return *_head_gradients(ctx, hidden, weight, d_logits), None


@torch.no_grad()
def is_likeliest(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Whether the target has the largest logit at each position, bool [R], so that greedy decoding would choose it.
    Shapes are as in `cross_entropy_sum`.
    """
    cast = weight.to(hidden.dtype)
    best = [_logits(hidden[rows], cast).argmax(-1) for rows in _chunks(hidden, weight)]
    return torch.cat(best) == targets if best else targets.new_zeros(0, dtype=torch.bool)


def draft_distances(
    hidden: Tensor, weight: Tensor, embedded: Tensor, markov: Tensor, teacher_hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The distances of a drafter's distribution q from the target and from the backbone's distribution p at every slot:
    -log q(target) in nats and sum |q - p|, both fp32 [R] (fp64 for fp64 input).

    q is the softmax of hidden [R, d] @ weight [V, d]^T + embedded [R, r] @ markov [V, r]^T, and p the softmax of
    teacher_hidden [R, d] @ weight^T; targets int64 [R]. hidden, embedded and markov get gradients, the tensors of the
    backbone do not. Logits are computed one chunk at a time, and again in the backward pass.
    """
    return _DraftDistances.apply(hidden, weight.detach(), embedded, markov, teacher_hidden.detach(), targets)


class _DraftDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, embedded, markov, teacher_hidden, targets):
        nll = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
        distance = torch.empty_like(nll)
        for rows, log_q, p in _drafts(hidden, weight, embedded, markov, teacher_hidden):
            nll[rows] = -log_q.gather(1, targets[rows, None]).squeeze(1)
            distance[rows] = (log_q.exp() - p).abs().sum(-1)
        ctx.save_for_backward(hidden, weight, embedded, markov, teacher_hidden, targets)
        return nll, distance

    @staticmethod
    def backward(ctx, d_nll: Tensor, d_distance: Tensor):
        hidden, weight, embedded, markov, teacher_hidden, targets = ctx.saved_tensors
        d_hidden, d_embedded = torch.empty_like(hidden), torch.empty_like(embedded)
        d_markov = torch.zeros_like(markov, dtype=_wide(markov))
        for rows, log_q, p in _drafts(hidden, weight, embedded, markov, teacher_hidden):
            q = log_q.exp_()
            sign = torch.sign(q - p)
            sign -= (q * sign).sum(-1, keepdim=True)
            d_logits = q * (sign.mul_(d_distance[rows, None]) + d_nll[rows, None])
            d_logits.scatter_add_(1, targets[rows, None], -d_nll[rows, None])
            d_hidden[rows] = (d_logits.to(hidden.dtype) @ weight.to(hidden.dtype)).to(d_hidden.dtype)
            d_embedded[rows] = (d_logits @ markov.to(d_logits.dtype)).to(embedded.dtype)
            d_markov += d_logits.t() @ embedded[rows].to(d_logits.dtype)
        return d_hidden, None, d_embedded, d_markov.to(markov.dtype), None, None


@without_autocast
def _drafts(hidden, weight, embedded, markov, teacher_hidden) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each chunk the range of its rows, the log-probabilities of the drafter (log q) and the probabilities of
    the backbone (p).
    """
    cast = weight.to(hidden.dtype)
    for rows in _chunks(hidden, weight):
        logits = _logits(hidden[rows], cast)
        logits += _logits(embedded[rows], markov.to(embedded.dtype))
        yield rows, logits.log_softmax(-1), _logits(teacher_hidden[rows], weight.to(teacher_hidden.dtype)).softmax(-1)


def reverse_kl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """KL(student || teacher) over the whole vocabulary at every position, in nats, fp32 [R] (fp64 for fp64 input).

    hidden [R, d] and weight [V, d] belong to the student and get gradients; teacher_hidden [R, d'] and teacher_weight
    [V, d'] get no gradients. The logits of student and teacher are computed one chunk at a time, and again in the
    backward pass.
    """
    return _ReverseKL.apply(hidden, weight, teacher_hidden.detach(), teacher_weight.detach())


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        cast, teacher = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        divergence = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
        for rows in _chunks(hidden, weight):
            own = _logits(hidden[rows], cast).log_softmax(-1)
            other = _logits(teacher_hidden[rows], teacher).log_softmax(-1)
            divergence[rows] = (own.exp() * (own - other)).sum(-1)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, divergence)
        return divergence

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, teacher_hidden, teacher_weight, divergence = ctx.saved_tensors
        teacher = teacher_weight.to(teacher_hidden.dtype)

        def d_logits(rows: slice, logits: Tensor) -> Tensor:
            own = logits.log_softmax(-1)
            other = _logits(teacher_hidden[rows], teacher).log_softmax(-1)
            return own.exp() * (own - other - divergence[rows, None]) * grad[rows, None]

        return *_head_gradients(ctx, hidden, weight, d_logits), None, None


def forward_kl(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, top_k: int | None = None
) -> Tensor:
    """KL(teacher || student) at every position, in nats, fp32 [R] (fp64 for fp64 input): over the whole vocabulary, or
    with `top_k` over the teacher's k likeliest tokens and one more class, which stands for all other tokens.

    Merging tokens into one class cannot increase a divergence, so the result with `top_k` is at most the divergence
    over the whole vocabulary. Shapes and gradients are as in `reverse_kl`.
    """
    top_k = None if top_k is None or top_k >= weight.shape[0] else top_k
    return _ForwardKL.apply(hidden, weight, teacher_hidden.detach(), teacher_weight.detach(), top_k)


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, top_k: int | None):
        cast, teacher = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        divergence = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
        for rows in _chunks(hidden, weight):
            own = _logits(hidden[rows], cast).log_softmax(-1)
            other = _logits(teacher_hidden[rows], teacher).log_softmax(-1)
            if top_k is not None:
                best = other.topk(top_k, dim=-1).indices
                own, other = _with_the_rest(own, best), _with_the_rest(other, best)
            divergence[rows] = (torch.special.xlogy(other.exp(), other.exp()) - other.exp() * own).sum(-1)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight)
        ctx.top_k = top_k
        return divergence

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, teacher_hidden, teacher_weight = ctx.saved_tensors
        teacher = teacher_weight.to(teacher_hidden.dtype)

        def d_logits(rows: slice, logits: Tensor) -> Tensor:
            own = logits.log_softmax(-1)
            other = _logits(teacher_hidden[rows], teacher).log_softmax(-1)
            if ctx.top_k is None:
                wanted = other.exp()
            else:  # the probability of the rest is divided over its tokens as the student divides it
                best = other.topk(ctx.top_k, dim=-1)
                rest = _with_the_rest(other, best.indices)[:, -1:] - _with_the_rest(own, best.indices)[:, -1:]
                wanted = (own + rest).exp().scatter_(1, best.indices, best.values.exp())
            return (own.exp() - wanted) * grad[rows, None]

        return *_head_gradients(ctx, hidden, weight, d_logits), None, None, None


def _with_the_rest(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """The log-probabilities [R, k + 1] of the k chosen tokens int64 [R, k] and, in the last column, of all other tokens
    together.
    """
    rest = log_probs.scatter(1, chosen, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(1, chosen), rest], dim=-1)


def _head_gradients(ctx, hidden: Tensor, weight: Tensor, d_logits) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight; `d_logits(rows, logits)` returns the gradient of a chunk's logits."""
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    cast = weight.to(hidden.dtype)
    d_hidden = torch.empty_like(hidden) if need_hidden else None
    d_weight = torch.zeros_like(weight, dtype=_wide(weight)) if need_weight else None
    for rows in _chunks(hidden, weight):
        chunk = d_logits(rows, _logits(hidden[rows], cast)).to(hidden.dtype)
        if need_hidden:
            d_hidden[rows] = chunk @ cast
        if need_weight:
            d_weight += chunk.t() @ hidden[rows]
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


@without_autocast
def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits [R, V] of hidden [R, d] and weight [V, d], which have the same dtype; for bf16 inputs the logits are
    fp32 and never rounded to bf16.
    """
    if hidden.is_cuda and hidden.dtype != _wide(hidden):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # not on the CPU
    return hidden.to(_wide(hidden)) @ weight.to(_wide(hidden)).t()


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield the row ranges of hidden [R, d] whose logits are computed at once."""
    step = max(1, CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cuda"]) // weight.shape[0])
    return (slice(start, start + step) for start in range(0, hidden.shape[0], step))


def _wide(x: Tensor) -> torch.dtype:
    """The dtype for sums over the vocabulary: fp32, or fp64 for fp64 input."""
    return torch.promote_types(x.dtype, torch.float32)
