"""Clipping, the KL estimator, masking, and the whole objective against plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.config.rl import PolicyLoss
from train.rl.loss import PolicyObjective, Responses, clipped_loss, off_policy_mask, unbiased_kl

LOSS = PolicyLoss(clip_low=0.2, clip_high=0.3, off_policy_threshold=None, kl=0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "stopped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.25, 2.0, -2.5, -2.0, False),
        (1.4, 2.0, -2.6, 0.0, True),  # a good token is raised far enough
        (0.5, 2.0, -1.0, -2.0, False),
        (1.4, -2.0, 2.8, 2.0, False),
        (0.7, -2.0, 1.6, 0.0, True),  # a bad one is lowered far enough
        (0.9, -2.0, 1.8, 2.0, False),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, slope: float, stopped: bool) -> None:
    x = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    value, clipped = clipped_loss(x, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.3)
    value.sum().backward()
    assert (float(value.detach()), float(x.grad), bool(clipped)) == pytest.approx((loss, slope, stopped))


def test_the_kl_estimator_is_unbiased_in_value_and_gradient_for_tokens_of_another_policy() -> None:
    """Its expectation over the old policy, summed over a whole vocabulary, is the divergence."""
    generator = torch.Generator().manual_seed(0)
    logits, behaviour, reference = (torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    policy, drawn = logits.log_softmax(-1), behaviour.log_softmax(-1)
    other = reference.log_softmax(-1)
    estimate = (drawn.exp() * unbiased_kl(policy, (policy - drawn).exp(), other)).sum()
    exact = (policy.exp() * (policy - other)).sum()
    torch.testing.assert_close(estimate, exact)
    slopes = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact)]
    torch.testing.assert_close(*slopes)
    assert (unbiased_kl(policy, torch.ones(9), other) >= 0).all()


def test_drift_masks_bad_responses_that_are_far_off_policy() -> None:
    log_ratio = torch.tensor([-0.3, -0.5, -0.3, -0.5, 0.3, -0.1, -2.0])
    response = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    masked = off_policy_mask(log_ratio, advantage, Responses(response, 4), threshold=0.35)
    assert masked.tolist() == [True, True, False, False, False, False, True]
    masked = off_policy_mask(log_ratio, advantage, Responses(response, 4), threshold=0.45)
    assert not masked[:6].any(), "the mean over a response decides"
    empty = torch.zeros(0)
    assert off_policy_mask(empty, empty, Responses(empty.long(), 0), 0.1).shape == (0,)


def given(reference: bool) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Two rows of three tokens, of which four are taught; the objective's tensors and what the model hands over."""
    generator = torch.Generator().manual_seed(1)
    names = ["old_log_probs", *["reference"] * reference]
    tensors = {name: -torch.rand(2, 3, generator=generator) * 3 for name in names}
    tensors["advantage"] = torch.tensor([[0.0, 1.0, 1.0], [0.0, -0.5, -0.5]])
    tensors["response"] = torch.tensor([[0, 0, 0], [1, 1, 1]])
    hidden, weight = torch.randn(4, 5, generator=generator), torch.randn(7, 5, generator=generator)
    return tensors, (hidden.requires_grad_(), weight, torch.tensor([3, 0, 6, 2]), torch.tensor([1, 2, 4, 5]))


def test_objective_against_plain_formulas() -> None:
    loss = PolicyLoss(clip_low=0.2, clip_high=0.3, off_policy_threshold=0.8, kl=0.1)
    tensors, (hidden, weight, targets, places) = given(reference=True)
    objective = PolicyObjective(loss, 2.0, **tensors)
    total = objective(hidden, weight, targets, places)
    (slope,) = torch.autograd.grad(total, hidden)

    log_probs = (hidden @ weight.t() / 2.0).log_softmax(-1)
    logp = log_probs.gather(1, targets[:, None])[:, 0]
    old, ref, advantage = (tensors[k].flatten()[places] for k in ("old_log_probs", "reference", "advantage"))
    ratio = (logp - old).exp()
    keep = torch.ones(4)
    if (old - logp)[2:].mean() > 0.8:
        keep[2:] = 0
    assert keep.sum() == 2, "the case is made so that the second response is masked"
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
    divergence = ratio * ((ref - logp).exp() - (ref - logp) - 1)
    plain = -(keep * surrogate).sum() + 0.1 * divergence.sum()
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(slope, torch.autograd.grad(plain, hidden)[0])
    sums = {name: float(value) for name, value in objective.sums.items()}
    assert sums["off_policy"] == 2 and sums["ratio"] == pytest.approx(float(ratio.detach().sum()), rel=1e-5)
    entropy = -(log_probs.exp() * log_probs).detach().sum()
    assert sums["entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_a_fresh_batch_is_the_plain_policy_gradient() -> None:
    tensors, (hidden, weight, targets, places) = given(reference=False)
    logp = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    tensors["old_log_probs"].view(-1)[places] = logp.detach()
    objective = PolicyObjective(LOSS, 1.0, **tensors)
    (slope,) = torch.autograd.grad(objective(hidden, weight, targets, places), hidden)
    expected = torch.autograd.grad(-(logp * tensors["advantage"].flatten()[places]).sum(), hidden)[0]
    torch.testing.assert_close(slope, expected)
    assert float(objective.sums["clipped"]) == 0 and float(objective.sums["ratio"]) == pytest.approx(4)


def test_tensors_of_other_shapes_are_refused() -> None:
    tensors, _ = given(reference=False)
    with pytest.raises(ValueError, match=r"must all be \[B, S\]"):
        PolicyObjective(LOSS, 1.0, **{**tensors, "advantage": torch.zeros(2)})
