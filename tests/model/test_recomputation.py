"""What a recomputed block takes from its first pass, and what it therefore does not do again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tiny import gradients, tiny_model

import model.attention
import model.offload
from model import ForwardOptions
from model.parallel.ranks import Parallel
from tests import processes
from tests.model.launches import Launches
from tests.model.test_context_parallel import model_of, text
from tests.model.test_losses import batch
from tests.model.test_parallel import batches, part_of, ranks_of, totals_of, whole_model

SEARCHES = ("select", "select_from_candidates")


def test_nothing_is_searched_or_scored_again(monkeypatch) -> None:
    """Two layers score all entries and one its candidates, once; no top-k runs in the backward."""
    searched: Counter[str] = Counter()
    for name in SEARCHES:
        search = getattr(model.attention, name)
        monkeypatch.setattr(
            model.attention, name, lambda *a, name=name, search=search: (searched.update([name]), search(*a))[1]
        )
    built, data = tiny_model(ForwardOptions(recompute=True)), batch()
    denominators = built.loss_denominators(**data)
    with Launches().counting() as forward:
        total = built.losses(**data, denominators=denominators).total
    assert searched == {"select": 2, "select_from_candidates": 1}
    assert forward.launched["aten::topk"] >= 6 + 3  # of every router and index source
    with Launches().counting() as backward:
        total.backward()
    assert searched.total() == 3
    assert backward.launched["aten::topk"] == 0
    assert backward.launched["aten::softplus"] == 6  # every router's scores are computed again


def test_entries_index_keys_and_selections_are_those_of_the_first_pass() -> None:
    """The same memory in both passes, so that what gathers it from other ranks need not run again."""
    built, data, seen = tiny_model(ForwardOptions(recompute=True)), batch(), []
    for layer in built.layers:
        layer.attn.register_forward_hook(lambda attention, _, out: seen.append((attention, out.shared)))
    built.losses(**data, denominators=built.loss_denominators(**data)).total.backward()
    assert len(seen) == 2 * len(built.layers)
    for (attention, first), (again, second) in zip(seen[:6], reversed(seen[6:]), strict=True):
        assert attention is again
        for name in ("compressed_kv", "index_keys", "topk_indices", "candidates"):
            ours, theirs = getattr(first, name), getattr(second, name)
            assert (ours is None) == (theirs is None), name
            assert ours is None or ours.data_ptr() == theirs.data_ptr(), name


def test_a_second_backward_uses_them_too() -> None:
    built, data = tiny_model(ForwardOptions(recompute=True)), batch()
    total = built.losses(**data, denominators=built.loss_denominators(**data)).total
    total.backward(retain_graph=True)
    once = gradients(built)
    total.backward()
    assert all(torch.equal(2 * once[name], twice) for name, twice in gradients(built).items())


@pytest.mark.parametrize("stream_dtype", ["fp32", "bf16"])
def test_offload_moves_the_streams_that_enter_every_block_and_nothing_else(stream_dtype: str, monkeypatch) -> None:
    """Losses and gradients are equal bit for bit. In the backward the streams come back in reverse order, each begun
    before the block behind it is recomputed.
    """
    plain = tiny_model(ForwardOptions(recompute=True, stream_dtype=stream_dtype), engram=True)
    data = batch()
    plain.losses(**data, denominators=plain.loss_denominators(**data)).total.backward()

    events: list[tuple[str, int]] = []
    entering: list[torch.Tensor] = []

    def to_host(x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr() == entering[-1].data_ptr() and x.shape == entering[-1].shape and not x.requires_grad
        events.append(("out", len(entering) - 1))
        return x.clone()  # so that a block that did not use the copy would be seen

    def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        events.append(("back", [x.equal(host) for x in entering].index(True)))
        return host.clone()

    monkeypatch.setattr(model.offload, "to_host", to_host)
    monkeypatch.setattr(model.offload, "to_device", to_device)
    run_block = type(plain).run_block

    def noted(built, layer: int, state, *arguments):
        entering.append(state.streams)
        return run_block(built, layer, state, *arguments)

    monkeypatch.setattr(type(plain), "run_block", noted)
    built = tiny_model(ForwardOptions(recompute=True, stream_dtype=stream_dtype, offload="inputs"), engram=True)
    for number, layer in enumerate(built.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: events.append(("run", number)))
    total = built.losses(**data, denominators=built.loss_denominators(**data)).total
    assert events == [(what, number) for number in range(6) for what in ("out", "run")]
    events.clear()
    total.backward()
    back = [("back", 5), *(event for n in range(5, 0, -1) for event in (("back", n - 1), ("run", n))), ("run", 0)]
    assert events == back
    wanted = gradients(plain)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(built).items())


def test_offload_needs_recomputation() -> None:
    with pytest.raises(ValueError, match="runtime.offload: 'inputs' needs runtime.recompute=true"):
        ForwardOptions(offload="inputs")
    on = ForwardOptions(recompute=True, offload="inputs")
    assert on.recomputing(False) == ForwardOptions() and on.recomputing(True) == on


def exchanges(rank: int, recompute: bool, keep_combined: bool) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
    """The rows that every all-to-all of the forward and of the backward moved, and the gradients."""
    built = part_of(whole_model(recompute=recompute, keep_combined=keep_combined), Parallel(ranks_of(2)))
    moved: list[int] = []
    honest = dist.all_to_all_single

    def counted(output, *arguments, **options):
        moved.append(output.dim())
        return honest(output, *arguments, **options)

    dist.all_to_all_single = counted
    data = batches(rank, vision=False)[1]
    total = built.losses(**data, denominators=totals_of(2, vision=False)).total
    forward, moved[:] = list(moved), []
    total.backward()
    return forward, list(moved), gradients(built)


def calls_of_chunks(rank: int, recompute: bool) -> tuple[Counter[str], Counter[str]]:
    """The collective calls of the forward and of the backward where two ranks hold a chunk each."""
    layout = {"context": 2}
    built = model_of(layout, {"recompute": recompute})
    calls: Counter[str] = Counter()
    for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single"):
        honest = getattr(dist, name)
        setattr(dist, name, lambda *a, name=name, honest=honest, **o: (calls.update([name]), honest(*a, **o))[1])
    batch = text([[32]])
    total = built.losses(**batch, denominators=model_of({}, {}).loss_denominators(**batch)).total
    forward = Counter(calls)
    calls.clear()
    total.backward()
    return forward, Counter(calls)


@pytest.mark.slow
@pytest.mark.distributed
def test_entries_are_not_gathered_again() -> None:
    """Two Full layers gather once, in the forward. Recomputation adds the exchanges of the halo: one in each of 6
    layers, and one for the open groups of the layer that compresses two tokens.
    """
    for (_, plain), (forward, backward) in zip(
        processes.run(2, calls_of_chunks, False), processes.run(2, calls_of_chunks, True), strict=True
    ):
        assert forward["all_gather_single"] == 2 and backward["all_gather_single"] == 0
        assert backward["reduce_scatter_single"] == plain["reduce_scatter_single"] == 2
        halo = backward["all_to_all_single"] - plain["all_to_all_single"]
        assert halo == forward["all_to_all_single"] == plain["all_to_all_single"]
        assert halo >= 6 + 1


@pytest.mark.slow
@pytest.mark.distributed
def test_experts_results_are_not_sent_again() -> None:
    """Per layer the forward exchanges counts, rows with their tags, and results; the backward the gradients of these
    three, and recomputation rows and tags alone, unless the results are to be sent again. The gradients are equal bit
    for bit.
    """
    found = {how: processes.run(2, exchanges, *how) for how in ((False, True), (True, True), (True, False))}
    for how, again in (((False, True), 0), ((True, True), 2), ((True, False), 3)):
        for (forward, backward, gradient), (_, _, plain) in zip(found[how], found[False, True], strict=True):
            assert len(forward) == 6 * (1 + 2 + 1)
            assert len(backward) == 6 * (3 + again), how
            assert all(torch.equal(gradient[name], value) for name, value in plain.items())
