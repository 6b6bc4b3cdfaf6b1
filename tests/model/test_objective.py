"""Routing replay, and objectives in the place of the cross-entropy with their chunked log-probabilities."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_same, gradients, tiny_model, tokens
from torch import Tensor

import model.loss
from model import DeepseekV41, ForwardOptions, LossWeights, forward_kl, reverse_kl, token_log_probs
from model.parallel.ranks import ONE_PROCESS
from model.parallel.tables import Head

SEQ_LENS = torch.tensor([[7, 11], [9, 4]])  # the second row ends in padding


def batch(seed: int = 0) -> dict[str, Tensor]:
    ids = tokens(2, 18, seed=seed)
    labels = ids.clone()
    labels[0, 2:6] = -100
    labels[1, 13:] = -100
    return {"input_ids": ids, "labels": labels, "seq_lens": SEQ_LENS}


def real_positions() -> Tensor:
    return torch.arange(18) < SEQ_LENS.sum(1, keepdim=True)


def recorded(built: DeepseekV41, data: dict[str, Tensor]) -> Tensor:
    """The experts of a plain forward, int16 [B, S, layers, k], -1 at padding."""
    chosen = []
    hooks = [layer.ffn.gate.register_forward_hook(lambda *a: chosen.append(a[-1].indices)) for layer in built.layers]
    with torch.no_grad():
        built(data["input_ids"], seq_lens=data["seq_lens"])
    for hook in hooks:
        hook.remove()
    routing = torch.full((2, 18, len(built.layers), 2), -1, dtype=torch.int16)
    routing[real_positions()] = torch.stack(chosen, 1).to(torch.int16)
    return routing


def losses(built: DeepseekV41, data: dict[str, Tensor], **more):
    return built.losses(**data, denominators=built.loss_denominators(**data), **more)


def test_replaying_its_own_routing_changes_nothing() -> None:
    built, data = tiny_model(engram=True), batch()
    plain = losses(built, data)
    plain.total.backward()
    expected = gradients(built)
    for routing in (recorded(built, data), torch.full((2, 18, 6, 2), -1, dtype=torch.int16)):
        built.zero_grad()
        replayed = losses(built, {**data, "routing": routing})
        replayed.total.backward()
        assert replayed.total == plain.total and torch.equal(replayed.expert_load, plain.expert_load)
        assert_same(gradients(built), expected, 1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_other_experts_are_used_where_recorded_and_train_the_router(recompute: bool) -> None:
    """Experts that the router would not choose: they alone are run, and its weights still get their gradient."""
    built, data = tiny_model(ForwardOptions(recompute=recompute), loss_weights=LossWeights(router_balance=0.0)), batch()
    own = recorded(built, data)
    routing = (own + 1) % 4
    routing[:, :4] = -1  # the first positions choose as usual
    routing[~real_positions()] = -1
    replayed = losses(built, {**data, "routing": routing})
    assert replayed.total != losses(built, data).total
    used = torch.zeros(6, 4, dtype=torch.int64)
    for layer in range(6):
        mine = torch.where(routing >= 0, routing, own)[real_positions()][:, layer]
        used[layer] = torch.bincount(mine.flatten().long(), minlength=4)
    # Behind the first layer, the router chooses by other inputs where nothing was recorded.
    assert torch.equal(replayed.expert_load[0, 0], used[0])
    replayed.total.backward()
    for layer in built.layers:
        assert layer.ffn.gate.weight.grad.abs().sum() > 0
    # The gradient is that of the weights: a step along it changes the loss as it says.
    weight = built.layers[3].ffn.gate.weight
    slope, before = weight.grad.square().sum(), losses(built, {**data, "routing": routing}).total
    with torch.no_grad():
        weight -= 1e-3 * weight.grad
    assert losses(built, {**data, "routing": routing}).total < before - 0.5e-3 * slope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:, :, :5], "routing must be an integer tensor"),
        (lambda r: r.float(), "routing must be an integer tensor"),
        (lambda r: r.masked_fill(r == 3, 4), "2 different experts of 0..3"),
        (lambda r: torch.where(torch.arange(2) > 0, r[..., :1], r), "2 different experts"),
        (lambda r: torch.where(torch.arange(2) > 0, -1, r), "2 different experts"),
    ],
)
def test_malformed_routing_is_refused(change, message: str) -> None:
    built, data = tiny_model(), batch()
    with pytest.raises(ValueError, match=message):
        losses(built, {**data, "routing": change(recorded(built, data))})


def test_objective_takes_the_place_of_the_cross_entropy() -> None:
    """Minus the log-probabilities summed is the cross-entropy; `places` read values that lie as the labels do."""
    built, data = tiny_model(), batch()
    plain = losses(built, data)
    plain.total.backward()
    expected = gradients(built)
    built.zero_grad()
    seen = {}

    def objective(hidden: Tensor, weight: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        seen["targets"], seen["there"] = targets, data["labels"].flatten()[places]
        return -token_log_probs(hidden, weight, targets)[0].sum()

    other = losses(built, data, objective=objective)
    other.total.backward()
    torch.testing.assert_close(other.lm_sum, plain.lm_sum)
    assert_same(gradients(built), expected, 1e-5)
    assert torch.equal(seen["targets"], seen["there"]) and len(seen["targets"]) == plain.supervised


@pytest.fixture(params=[2**21, 14])
def head(request, monkeypatch) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [5, 4], weight [7, 4], targets; at once and in chunks of fewer rows."""
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", request.param)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64, requires_grad=True) for n in (5, 7))
    return hidden, weight, torch.tensor([0, 6, 3, 3, 1])


def test_token_log_probs_and_their_gradients(head) -> None:
    hidden, weight, targets = head
    log_probs, entropy = token_log_probs(*head)
    reference = (hidden @ weight.t()).log_softmax(-1)
    torch.testing.assert_close(log_probs, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1).detach())
    assert not entropy.requires_grad
    assert torch.autograd.gradcheck(lambda h, w: token_log_probs(h, w, targets)[0], (hidden, weight))


def test_reverse_kl_and_its_gradients(head) -> None:
    hidden, weight, _ = head
    generator = torch.Generator().manual_seed(1)
    teacher = [torch.randn(n, 3, generator=generator, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    divergence = reverse_kl(hidden, weight, *teacher)
    own = (hidden @ weight.t()).log_softmax(-1)
    other = (teacher[0] @ teacher[1].t()).log_softmax(-1)
    torch.testing.assert_close(divergence, (own.exp() * (own - other)).sum(-1))
    assert torch.autograd.gradcheck(lambda h, w: reverse_kl(h, w, *teacher), (hidden, weight))
    divergence.sum().backward()
    assert teacher[0].grad is None and teacher[1].grad is None
    assert reverse_kl(hidden, weight, hidden, weight).abs().max() < 1e-12


@pytest.mark.parametrize("top_k", [None, 7, 3, 1])
def test_forward_kl_and_its_gradients(head, top_k: int | None) -> None:
    """Against the formula in fp64; with top-k, the tokens that are not the teacher's likeliest are one class."""
    hidden, weight, _ = head
    generator = torch.Generator().manual_seed(1)
    teacher = [torch.randn(n, 3, generator=generator, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    divergence = forward_kl(hidden, weight, *teacher, top_k)
    q, p = (hidden @ weight.t()).softmax(-1), (teacher[0] @ teacher[1].t()).softmax(-1)
    order = p.argsort(-1, descending=True)[:, : top_k or 7]
    q_top, p_top = q.gather(1, order), p.gather(1, order)
    expected = (p_top * (p_top / q_top).log()).sum(-1)
    if top_k in (1, 3):
        q_rest, p_rest = 1 - q_top.sum(-1), 1 - p_top.sum(-1)
        expected = expected + p_rest * (p_rest / q_rest).log()
        assert (divergence < forward_kl(hidden, weight, *teacher)).all()
    torch.testing.assert_close(divergence, expected)
    assert torch.autograd.gradcheck(lambda h, w: forward_kl(h, w, *teacher, top_k), (hidden, weight))
    divergence.sum().backward()
    assert teacher[0].grad is None and teacher[1].grad is None
    assert forward_kl(hidden, weight, hidden, weight, top_k).abs().max() < 1e-12


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_low_precision_are_not_rounded_to_it(head, autocast: bool) -> None:
    low, targets = [x.detach().bfloat16() for x in head[:2]], head[2]
    exact = [x.double() for x in low]
    teacher = [x.flip(0) for x in low], [x.flip(0) for x in exact]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = token_log_probs(*low, targets)[0], reverse_kl(*low, *teacher[0])
        logits = built_head(low[1].float())(low[0])
    assert {x.dtype for x in (*found, logits)} == {torch.float32}
    torch.testing.assert_close(found[0].double(), token_log_probs(*exact, targets)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), reverse_kl(*exact, *teacher[1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.double(), exact[0] @ exact[1].t(), atol=1e-5, rtol=0)


def built_head(weight: Tensor) -> Head:
    built = Head(weight.shape[1], weight.shape[0], ONE_PROCESS.vocabulary)
    built.weight = torch.nn.Parameter(weight)
    return built
