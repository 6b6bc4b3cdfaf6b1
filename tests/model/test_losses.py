"""losses() against forward(), micro-batches against the whole batch, recomputation, chunked cross-entropy."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny import assert_same, gradients, no_rounding, tiny_config, tiny_model, tokens  # noqa: F401

import model.loss
from model import ForwardOptions, LossDenominators, LossWeights
from model.layout import build_layout
from model.loss import cross_entropy_sum
from model.sparse import CHUNK_ELEMENTS

LM_ONLY = LossWeights(router_balance=0.0, indexer_kl=0.0)


def batch(rows: int = 4, length: int = 18, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows with different numbers of supervised tokens, documents and padding."""
    ids = tokens(rows, length, seed=seed)
    labels = ids.clone()
    labels[0, 2:9] = -100
    labels[2] = -100  # a row without any target
    seq_lens = torch.tensor([[7, 11], [18, 0], [9, 9], [5, 10]])
    labels[3, 15:] = -100
    return {"input_ids": ids, "labels": labels, "seq_lens": seq_lens}


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_losses_equal_forward(attention: str) -> None:
    built = tiny_model(ForwardOptions(attention=attention), loss_weights=LM_ONLY, engram=True)
    data = batch()
    out = built(**data)
    out.loss.backward()
    whole = {name: p.grad for name, p in built.named_parameters() if ".indexer." not in name}
    built.zero_grad()
    denominators = built.loss_denominators(**data)
    losses = built.losses(**data, denominators=denominators)
    assert losses.supervised == denominators.supervised and losses.expert_load.sum() == 6 * 2 * denominators.num_tokens
    torch.testing.assert_close(losses.total, out.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(losses.lm_sum / losses.supervised, out.loss, atol=1e-6, rtol=1e-6)
    losses.total.backward()
    assert_same({k: v for k, v in gradients(built).items() if k in whole}, whole, 1e-5)


def rows(data: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {key: value[start:stop] for key, value in data.items()}


def test_micro_batches_add_up(no_rounding) -> None:  # noqa: F811
    """All three losses on: the gradients of unequal micro-batches sum to the whole batch's within 1e-6, or 1e-5 where
    an Engram gate's square root near zero magnifies rounding.
    """
    built = tiny_model(loss_weights=LossWeights(router_balance=0.1), engram=True)
    data = batch()
    denominators = built.loss_denominators(**data)
    built.losses(**data, denominators=denominators).total.backward()
    whole = gradients(built)
    for cuts in ([0, 1, 2, 3, 4], [0, 3, 4]):
        built.zero_grad()
        parts = [rows(data, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        pieces = [built.loss_denominators(**part) for part in parts]
        assert torch.equal(sum(pieces[1:], pieces[0]).to_tensor(), denominators.to_tensor())
        assert torch.equal(
            LossDenominators.from_tensor(denominators.to_tensor()).index_queries, denominators.index_queries
        )
        for part in parts:
            built.losses(**part, denominators=denominators).total.backward()
        for name, gradient in gradients(built).items():
            limit = 1e-5 if ".engram." in name else 1e-6
            torch.testing.assert_close(gradient, whole[name], atol=limit, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_recomputation_changes_nothing(attention: str) -> None:
    """Same losses, statistics and gradients bit for bit; expert loads are counted once."""
    built = tiny_model(ForwardOptions(attention=attention), engram=True, vision=False)
    data = batch()
    results = []
    for recompute in (False, True):
        built.runtime = dataclasses.replace(built.runtime, recompute=recompute)
        built.zero_grad()
        losses = built.losses(**data, denominators=built.loss_denominators(**data))
        losses.total.backward()
        results.append((losses, gradients(built)))
    (plain, plain_gradients), (again, again_gradients) = results
    for name, value in plain._asdict().items():
        assert torch.equal(value, getattr(again, name)), name
    assert all(torch.equal(gradient, again_gradients[name]) for name, gradient in plain_gradients.items())


def test_recomputation_really_recomputes() -> None:
    built = tiny_model(ForwardOptions(recompute=True))
    calls = []
    built.layers[2].ffn.register_forward_hook(lambda *_: calls.append(1))
    data = batch()
    built.losses(**data, denominators=built.loss_denominators(**data)).total.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("budget", [1, 200, 10**6])
def test_chunked_cross_entropy(budget: int, monkeypatch) -> None:
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", budget)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 12, generator=g).requires_grad_()
    weight = torch.randn(61, 12, generator=g).requires_grad_()
    targets = torch.randint(61, (23,), generator=g)
    ours = cross_entropy_sum(hidden, weight, targets)

    def theirs_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")

    theirs = theirs_of(hidden, weight)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(2 * x, (hidden, weight)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    only_hidden = torch.autograd.grad(cross_entropy_sum(hidden, weight.detach(), targets), hidden)[0]
    torch.testing.assert_close(only_hidden, torch.autograd.grad(theirs_of(hidden, weight), hidden)[0])


def test_cross_entropy_of_nothing_is_zero() -> None:
    hidden, weight = torch.zeros(0, 12, requires_grad=True), torch.randn(61, 12, requires_grad=True)
    loss = cross_entropy_sum(hidden, weight, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss == 0 and weight.grad.abs().max() == 0


def test_targets() -> None:
    labels = torch.tensor([[5, 6, 7, 8, -100, 9], [10, 11, 12, 13, 14, 15]])
    layout = build_layout(tiny_config().text, labels, seq_lens=torch.tensor([[3, 3], [1, 2]]))
    assert layout.targets(labels).tolist() == [6, 7, -100, -100, 9, -100, -100, 12, -100]


def test_training_never_builds_the_logits(monkeypatch) -> None:
    """losses() makes no tensor of [tokens, vocabulary]; forward() does."""
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", 61 * 8)
    built = tiny_model()
    data = {"input_ids": tokens(1, 80), "labels": tokens(1, 80)}
    seen: list[tuple[int, ...]] = []

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                seen.append(tuple(out.shape))
            return out

    with Shapes():
        built.losses(**data, denominators=built.loss_denominators(**data)).total.backward()
    assert (8, 61) in seen and not [s for s in seen if s[-1:] == (61,) and s[0] >= 79]
    with Shapes():
        built(**data)
    assert (80, 61) in seen


@pytest.mark.parametrize(("attention", "document"), [("sparse", None), ("sparse", 4), ("sparse", 64), ("dense", None)])
def test_no_tensor_grows_with_the_square_of_the_length(attention: str, document: int | None, monkeypatch) -> None:
    """The largest tensor of a whole training step at twice the length: twice as large, for the sparse path, for one
    document or many short ones; the dense path shows that the measurement would see a square.
    """
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 2**12)
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", 2**12)
    built = tiny_model(ForwardOptions(attention=attention), candidate_topk_blocks=8)

    def largest(length: int) -> int:
        sizes: list[int] = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for tensor in out if isinstance(out, (list, tuple)) else [out]:
                    if isinstance(tensor, torch.Tensor):
                        sizes.append(tensor.numel())
                return out

        data = {"input_ids": tokens(1, length), "labels": tokens(1, length)}
        if document:
            data["seq_lens"] = torch.full((1, length // document), document)
        with Sizes():
            built.losses(**data, denominators=built.loss_denominators(**data)).total.backward()
        return max(sizes)

    short, long = largest(512), largest(1024)
    if attention == "sparse":
        assert long <= 2.05 * short and long < 1024 * 1024
    else:
        assert long >= 3.9 * short


def test_autocast_keeps_the_gradients_near() -> None:
    """bf16 autocast runs through every custom gradient; fp32 parameters get fp32 gradients."""
    built = tiny_model(engram=True)
    data = batch()
    denominators = built.loss_denominators(**data)
    exact = built.losses(**data, denominators=denominators)
    with torch.autocast("cpu", torch.bfloat16):
        losses = built.losses(**data, denominators=denominators)
    losses.total.backward()
    assert abs(losses.lm_sum / exact.lm_sum - 1) < 0.05
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients(built).values())


def test_malformed_batches_are_named() -> None:
    """What the public API is given wrongly comes out as a sentence, not as an error from deep inside."""
    built = tiny_model()
    ids = tokens(1, 12)
    pixels, grids = torch.zeros(9, 3, 4, 4), torch.tensor([[3, 3]])
    wrong = [
        ({"input_ids": ids[0]}, "input_ids must be"),
        ({"input_ids": ids, "labels": ids[:, :-1]}, "labels must be"),
        ({"input_ids": ids, "labels": torch.full_like(ids, -5)}, "labels contain -5"),
        ({"input_ids": ids, "labels": torch.full_like(ids, 10**6)}, "labels contain 1000000"),
        ({"input_ids": ids, "vision_token_types": ids[:, :-1]}, "vision_token_types must be"),
        ({"input_ids": ids, "pixel_values": pixels}, "must be given together"),
        ({"input_ids": ids, "pixel_values": pixels, "image_grid_hws": grids}, "need vision_token_types"),
        ({"input_ids": ids, "vision_token_types": torch.ones_like(ids)}, "no vision_config"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            built(**arguments)
    text_only = torch.full_like(ids, -1)
    assert torch.equal(built(ids, vision_token_types=text_only).logits, built(ids).logits)


def test_no_target_is_a_zero_loss() -> None:
    """A batch without a supervised target, or of one token: 0 in both APIs, and finite gradients."""
    built = tiny_model()
    for ids in (tokens(2, 9), tokens(1, 1)):
        labels = torch.full_like(ids, -100)
        assert built(ids, labels=labels).loss == 0
        losses = built.losses(ids, labels, built.loss_denominators(ids, labels))
        losses.total.backward()
        assert losses.lm_sum == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in built.parameters())


def test_evaluation_keeps_the_streams_of_one_block() -> None:
    """Not those of every block, which for 64K tokens of the released model are 5 GB each."""
    built, entered, alive = tiny_model(), [], []

    def before(block, arguments) -> None:
        entered.append(weakref.ref(arguments[0].streams))
        alive.append(sum(streams() is not None for streams in entered))

    for block in built.layers:
        block.register_forward_pre_hook(before)
    ids = torch.arange(24).view(1, 24)
    with torch.no_grad():
        built.losses(ids, ids, built.loss_denominators(ids, ids))
    assert alive == [1] * len(built.layers)
