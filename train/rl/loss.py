"""The policy-gradient objective of a micro-batch, in the form that ``model.losses`` takes.

For a token with probability ratio r = pi / pi_old and advantage A the loss is -min(r A, clip(r, 1 - low, 1 + high) A).
This loss is summed over the tokens of a step and divided by the number of these tokens. Optionally a KL divergence to
the reference policy is added. The tokens of a masked response (see ``off_policy_mask``) are left out of the first term,
but still count towards the number of tokens and the KL divergence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model import token_log_probs
from model.parallel.context import sum_over
from model.parallel.ranks import ONE_RANK, RankGroup
from train.config.rl import PolicyLoss


class PolicyObjective:
    """Computes the objective of one micro-batch and adds its statistics to ``sums`` (detached, fp64).

    All tensors are [B, S] and aligned with the labels.

    Args:
        temperature: the sampling temperature of the responses.
        old_log_probs: log-probability of each token under the policy that drew it, fp32.
        advantage: advantage of the response that the token belongs to, fp32.
        response: index of the response that the token belongs to, counted from 0, int64.
        reference: log-probability of each token under the reference policy, fp32; needed if ``loss.kl`` is not 0.
        context: the ranks that share the batch under context parallelism, each with its own tokens.
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
        context: RankGroup = ONE_RANK,
    ):
        self.context = context
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
            responses = Responses(at["response"], int(self.tensors["response"].max()) + 1, self.context)
            masked = off_policy_mask(log_ratio.detach(), at["advantage"], responses, threshold)
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
    """Compute the clipped loss of each token, and whether clipping set its gradient to zero; both [R]."""
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(plain, clipped), clipped < plain


def unbiased_kl(log_probs: Tensor, ratio: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each of R tokens that an older policy has drawn; returns [R].

    The estimate is q/p - log(q/p) - 1 (the estimator k3, which is never negative) times the importance ratio, where p
    is the probability under the policy and q under the reference. With the importance ratio as weight, value and
    gradient of the estimate are unbiased, although an older policy drew the tokens.
    """
    log_quotient = reference - log_probs
    return ratio * (log_quotient.exp() - log_quotient - 1)


class Responses(NamedTuple):
    """The assignment of R tokens to responses: ``of_token`` (int64 [R]) is the index of each token's response,
    ``total`` the number of responses, and ``context`` the ranks that have the other tokens of these responses.
    """

    of_token: Tensor
    total: int
    context: RankGroup = ONE_RANK


def off_policy_mask(log_ratio: Tensor, advantage: Tensor, responses: Responses, threshold: float) -> Tensor:
    """Return which of R tokens (bool [R]) belong to a response that is left out of the policy loss.

    A response is left out if its advantage is negative and it has become off-policy: the mean of log(old policy's
    probability / current policy's probability) over its tokens is above ``threshold``. The policy would no longer write
    such a response, so little can be learnt from it, and lowering its probability further makes training unstable.
    Responses with a positive advantage are never left out.
    """
    response, zeros = responses.of_token, log_ratio.new_zeros(responses.total)
    distance = zeros.index_add(0, response, -log_ratio)
    tokens = zeros.index_add(0, response, torch.ones_like(log_ratio))
    distance, tokens = sum_over(torch.stack([distance, tokens]), responses.context)
    return ((distance / tokens.clamp(min=1)) > threshold)[response] & (advantage < 0)
