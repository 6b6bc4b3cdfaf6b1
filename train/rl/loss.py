"""The policy-gradient objective of one batch, in the form that ``model.losses`` takes.

For a token with ratio r = pi / pi_old and advantage A the loss is -min(r A, clip(r, 1 - low, 1 + high) A), summed
over tokens and divided by the step's tokens; optionally plus a KL divergence to the reference policy. The tokens of a
masked response (see ``off_policy_mask``) do not enter the first term; they do count in the divisor and in the
divergence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import token_log_probs
from train.config.rl import PolicyLoss


class PolicyObjective:
    """The objective of one micro-batch; its statistics are added to ``sums`` (detached, fp64).

    Tensors [B, S], aligned with the labels: ``old_log_probs`` fp32 (under the policy that drew the token),
    ``advantage`` fp32, ``response`` int64 (which response a token belongs to, counted from 0) and, with ``loss.kl``,
    ``reference`` fp32 (log-probability under the reference policy). ``temperature``: the one used in sampling.
    """

    NAMES = ("ratio", "clipped", "off_policy", "kl", "entropy", "approx_kl")

    def __init__(
        self,
        loss: PolicyLoss,
        temperature: float,
        old_log_probs: Tensor,
        advantage: Tensor,
        response: Tensor,
        reference: Tensor | None = None,
    ):
        self.loss, self.temperature = loss, temperature
        self.tensors = {"old_log_probs": old_log_probs, "advantage": advantage, "response": response}
        if reference is not None:
            self.tensors["reference"] = reference
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        if any(tensor.shape != old_log_probs.shape for tensor in self.tensors.values()):
            raise ValueError(f"the tensors of a batch must all be [B, S], got {shapes}")
        self.sums = dict.fromkeys(self.NAMES, torch.zeros((), dtype=torch.float64))

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        log_probs, entropy = token_log_probs(hidden / self.temperature, weight, targets)
        at = {name: tensor.flatten()[places] for name, tensor in self.tensors.items()}
        log_ratio = log_probs - at["old_log_probs"]
        ratio = log_ratio.exp()
        masked = torch.zeros_like(ratio, dtype=torch.bool)
        if self.loss.off_policy_threshold is not None:
            threshold = self.loss.off_policy_threshold
            masked = off_policy_mask(log_ratio.detach(), at["advantage"], at["response"], threshold)
        policy, clipped = clipped_loss(ratio, at["advantage"], self.loss.clip_low, self.loss.clip_high)
        total = policy.masked_fill(masked, 0.0).sum()
        divergence = torch.zeros_like(ratio)
        if self.loss.kl:
            divergence = unbiased_kl(log_probs, ratio, at["reference"])
            total = total + self.loss.kl * divergence.sum()
        clipped = clipped & ~masked
        values = {"ratio": ratio, "clipped": clipped, "off_policy": masked, "kl": divergence, "entropy": entropy}
        self._count({**values, "approx_kl": -log_ratio})
        return total

    def _count(self, values: dict[str, Tensor]) -> None:
        self.sums = {name: self.sums[name] + values[name].detach().double().sum() for name in self.NAMES}


def clipped_loss(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(loss, whether clipping stopped its gradient), [R] each."""
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(plain, clipped), clipped < plain


def unbiased_kl(log_probs: Tensor, ratio: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of tokens drawn by the old policy, [R]: the estimator q/p - log(q/p) - 1 (k3),
    which is never negative, weighted by the importance ratio, so that value and gradient are unbiased although another
    policy drew the tokens.
    """
    log_quotient = reference - log_probs
    return ratio * (log_quotient.exp() - log_quotient - 1)


def off_policy_mask(log_ratio: Tensor, advantage: Tensor, response: Tensor, threshold: float) -> Tensor:
    """bool [R]: the token belongs to a response with a negative advantage that has become off-policy, that is, the mean
    of log(old / policy) over its tokens is above ``threshold``. There is little to learn from what the policy would
    no longer write, and pushing it away further makes training unstable; good responses are kept.
    """
    count = int(response.max()) + 1 if response.numel() else 0
    zeros = log_ratio.new_zeros(count)
    distance = zeros.index_add(0, response, -log_ratio)
    tokens = zeros.index_add(0, response, torch.ones_like(log_ratio))
    return ((distance / tokens.clamp(min=1)) > threshold)[response] & (advantage < 0)
