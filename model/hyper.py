"""Single-pass manifold-constrained hyper-connections (mHC): n residual streams that are mixed with input-dependent
coefficients.

In shapes, T is the number of tokens, n the number of residual streams (`hc_mult`) and d the hidden size. Coefficients
are always fp32. The input of a sublayer is `collapse(X, pre)`, where the previous sublayer computed `pre`, and the
output y of the sublayer changes the streams X to `expand(X, y, post, comb)`. The coefficients of a sublayer are
computed from the streams before the sublayer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import TextConfig
from model.kernels.switch import in_triton
from model.norm import RMSNorm
from model.precision import for_products


class Mix(NamedTuple):
    """The mHC coefficients of one sublayer, fp32: pre [T, n], post [T, n], comb [T, n, n] (axis 1 is the source
    stream).
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


class HyperConnection(nn.Module):
    """Computes the mHC coefficients of one sublayer, with the parameters `fn` [(2+n)n, n*d], `base` [(2+n)n] and
    `scale` [3], which are fp32 whatever the model's dtype is.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        n, d = config.hc_mult, config.hidden_size
        self.n, self.iters, self.hc_eps, self.eps = n, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * d, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty((2 + n) * n, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def forward(self, streams: Tensor) -> Mix:
        """Compute the coefficients of this sublayer from the residual streams [T, n, d]."""
        if in_triton(streams):
            from model.kernels import hyper as kernels

            parameters = (self.fn, self.base, self.scale)
            return Mix(*kernels.coefficients(streams, *parameters, self.iters, self.hc_eps, self.eps))
        n = self.n
        with torch.autocast(streams.device.type, enabled=False):
            # the token axis is last, so that the many small steps below run on long contiguous rows
            mixes = _NormalisedProduct.apply(streams.flatten(1), self.fn, self.eps)  # [(2+n)n, T]
            scale = torch.cat([part.expand(size) for part, size in zip(self.scale, (n, n, n * n), strict=True)])
            logits = mixes * scale[:, None] + self.base[:, None]
            pre = torch.sigmoid(logits[:n]) + self.hc_eps
            post = 2 * torch.sigmoid(logits[n : 2 * n])
            comb = sinkhorn(logits[2 * n :].unflatten(0, (n, n)), self.iters, self.hc_eps)
        return Mix(pre.t().contiguous(), post.t().contiguous(), comb.permute(2, 0, 1).contiguous())


class _NormalisedProduct(torch.autograd.Function):
    """Computes fn @ flat^T * rsqrt(mean(flat^2) + eps), fp32 [k, T], for flat [T, m] of any dtype and fn fp32 [k, m].
    The backward pass writes the gradient of flat only once.
    """

    @staticmethod
    def forward(ctx, flat: Tensor, fn: Tensor, eps: float) -> Tensor:
        wide = flat.float()
        scale = torch.rsqrt(wide.square().mean(-1) + eps)
        mixes = fn @ wide.t() * scale
        ctx.save_for_backward(flat, fn, mixes, scale)
        return mixes

    @staticmethod
    def backward(ctx, grad: Tensor):
        flat, fn, mixes, scale = ctx.saved_tensors
        wide, d_product = flat.float(), grad * scale
        # The gradient through the scale is parallel to flat
        along = (grad * mixes).sum(0) * scale.square() / flat.shape[1]
        d_flat = (d_product.t() @ fn).addcmul_(wide, along[:, None], value=-1)
        return d_flat.to(flat.dtype), d_product @ wide, None


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Turn logits [n, n, T] into (nearly) doubly stochastic matrices [n, n, T], fp32.

    The steps are a softmax over the target axis plus eps, one normalisation of columns, and then iters-1 normalisations
    of rows and columns in turn; eps is added to every denominator.
    """
    return _Sinkhorn.apply(logits, iters, eps)


class _Sinkhorn(torch.autograd.Function):
    """Stores only the softmax and the denominators of every Sinkhorn step, and repeats the divisions in the backward
    pass, because storing 2*iters small matrices per token would take most of a block's memory. All steps are done in
    place, because launching many small operations is the main cost.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, iters: int, eps: float) -> Tensor:
        soft = torch.softmax(logits, dim=1)
        denominators = soft.new_empty(2 * iters - 1, *soft.shape[1:])
        ctx.save_for_backward(soft, denominators)
        ctx.eps = eps
        m = soft + eps
        for k, total in enumerate(denominators):
            torch.sum(m, k % 2, out=total).add_(eps)  # even: columns (over sources), odd: rows (over targets)
            m.div_(total.unsqueeze(k % 2))
        return m

    @staticmethod
    def backward(ctx, grad: Tensor):
        soft, denominators = ctx.saved_tensors
        states = soft.new_empty(len(denominators), *soft.shape)
        m = soft + ctx.eps
        for k, state in enumerate(states):
            m = torch.div(m, denominators[k].unsqueeze(k % 2), out=state)
        grad = grad.clone(memory_format=torch.contiguous_format)
        product, total = torch.empty_like(soft), torch.empty_like(denominators[0])
        for k in reversed(range(len(states))):
            torch.sum(torch.mul(grad, states[k], out=product), k % 2, out=total)
            grad.sub_(total.unsqueeze(k % 2)).div_(denominators[k].unsqueeze(k % 2))
        return soft * (grad - (grad * soft).sum(1, keepdim=True)), None, None


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Collapse the residual streams [T, n, d] with weights pre fp32 [T, n]: returns sum_i pre[:, i] * streams[:, i],
    [T, d] in the dtype of the streams.
    """
    if in_triton(streams):
        from model.kernels import hyper as kernels

        return kernels.collapse(streams, pre)
    return _Collapse.apply(streams, pre)


def collapse_normed(streams: Tensor, pre: Tensor, norm: RMSNorm) -> Tensor:
    """The normalised input [T, d] of a sublayer or of the head: the residual streams, collapsed and normalised. If the
    streams are bf16, the result is cast to a dtype that can be multiplied with the parameters.
    """
    return for_products(norm(collapse(streams, pre)), norm.weight)


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(streams, pre)
        return _weighted_sum(streams, pre, torch.empty_like(streams[:, 0]))

    @staticmethod
    def backward(ctx, grad: Tensor):
        streams, pre = ctx.saved_tensors
        d_streams = (grad[:, None, :] * pre[:, :, None]).to(streams.dtype)
        d_pre = torch.bmm(streams.float(), grad.float()[:, :, None]).squeeze(-1)
        return d_streams, d_pre


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Update the residual streams X [T, n, d] with a sublayer's output y [T, d]: X'[j] = post[j] * y + sum_i comb[i, j]
    * X[i].
    """
    if in_triton(streams):
        from model.kernels import hyper as kernels

        return kernels.expand(streams, y, post, comb)
    return _Expand.apply(streams, y, post, comb)


class _Expand(torch.autograd.Function):
    """Computes `expand` with n*(n+1) fused multiply-adds on [T, d], because on a CPU a batched product of T tiny
    matrices is several times slower.
    """

    @staticmethod
    def forward(ctx, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(streams, y, post, comb)
        out = torch.empty_like(streams)
        for rows in _cache_sized(streams):
            for j in range(streams.shape[1]):
                term = (y[rows], post[rows, j : j + 1])
                _weighted_sum(streams[rows], comb[rows, :, j], out[rows, j], term)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        streams, y, post, comb = ctx.saved_tensors
        d_streams, d_y = torch.empty_like(streams), torch.empty_like(y)
        d_post, d_comb = torch.empty_like(post), torch.empty_like(comb)
        for rows in _cache_sized(streams):
            for i in range(streams.shape[1]):
                _weighted_sum(grad[rows], comb[rows, i, :], d_streams[rows, i])
            _weighted_sum(grad[rows], post[rows], d_y[rows])
            wide = grad[rows].float()
            d_post[rows] = torch.bmm(wide, y[rows].float()[:, :, None]).squeeze(-1)
            d_comb[rows] = torch.bmm(streams[rows].float(), wide.transpose(1, 2))
        return d_streams, d_y, d_post, d_comb


def _cache_sized(streams: Tensor):
    """Yield the ranges of tokens that are processed together: on a CPU, ranges so short that their streams fit into a
    core's cache; on other devices, all tokens at once.
    """
    tokens = streams.shape[0]
    step = max(1, 2**18 // streams.shape[1:].numel()) if streams.device.type == "cpu" else max(1, tokens)
    return (slice(start, start + step) for start in range(0, tokens, step))


def _weighted_sum(x: Tensor, weights: Tensor, out: Tensor, term: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Write sum_i weights[:, i] * x[:, i] (+ term[0] * term[1]) to `out`, accumulated in fp32: x [T, n, d], weights
    fp32 [T, n], out [T, d], which may be a strided view.
    """
    total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    torch.mul(x[:, 0], weights[:, 0:1], out=total)
    for i in range(1, x.shape[1]):
        total.addcmul_(x[:, i].float(), weights[:, i : i + 1])
    if term is not None:
        total.addcmul_(term[0].float(), term[1])
    return out if total is out else out.copy_(total)
