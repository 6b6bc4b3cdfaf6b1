"""A micro-batch split over the ranks of context parallelism against one process that has it whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import model.attention
import model.moe
from model import DeepseekV41, ForwardOptions, LossDenominators, LossWeights, load_pretrained
from model.chunk import chunk_of
from model.layout import SequenceLayout, build_layout
from model.parallel import context
from model.parallel.context import GatherPlan, HaloPlan
from model.parallel.ranks import Parallel, RankGroup
from model.quantize import KV_INDEX, KV_MAIN
from tests import processes
from tests.model.golden_files import load_oracle
from tests.model.test_parallel import assembled, part_of, ranks_of
from tests.model.tiny import (  # noqa: F401
    assert_same,
    image_batch,
    no_rounding,
    switch_rounding_off,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.distributed

NOISE = {"atol": 5e-6, "rtol": 2e-5}  # of sums that four ranks take in other orders; 2.7e-6 was measured
# Of tiny.py: a window of 6 tokens, groups of 2 tokens and of 1; with 32 tokens on two ranks the cut is before token 16.
ROWS: dict[str, list[list[int]]] = {
    "one document": [[32]],
    "inside a group": [[3, 29]],
    "inside a window": [[13, 19]],
    "at the cut": [[16, 16]],
    "before a one-token document": [[16, 1, 15]],
    "behind a one-token document": [[15, 1, 16]],
    "chunks of the window's length": [[12]],
    "chunks shorter than the window": [[7]],
    "one token each": [[1] * 12],
    "no entry": [[1, 1, 1, 1]],
    "one token": [[1, 0]],
    "three tokens": [[2, 1]],
    "two rows with padding": [[20, 5, 0], [9, 1, 17]],
}


def text(seq_lens: list[list[int]]) -> dict[str, Tensor]:
    """Rows of documents, one token in four unsupervised."""
    lengths = torch.tensor(seq_lens)
    ids = tokens(len(lengths), int(lengths.sum(1).max()) + (len(lengths) > 1), seed=len(seq_lens[0]))
    dropped = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.25
    return {"input_ids": ids, "labels": ids.masked_fill(dropped, -100), "seq_lens": lengths}


BATCHES = {name: text(lens) for name, lens in ROWS.items()} | {
    # START at 2, two rows of two features each with a NEWLINE, END at 9; the second at 10 to 19; 24 tokens, cut at 12
    "image across the cut": image_batch([(6, 5), (6, 6)], 24),
    "images on one side": image_batch([(3, 5)], 24),
}
# The batches of the groups of ranks, what is split over how many ranks, and options of the model.
Case = tuple[list[str], dict[str, Any], dict[str, Any]]


def model_of(layout: dict[str, Any], how: dict[str, Any]) -> DeepseekV41:
    """The tiny model, or this rank's part of it."""
    options = {name: value for name, value in how.items() if name != "vision"}
    weights = LossWeights(router_balance=0.1, indexer_kl=0.5)
    whole = tiny_model(ForwardOptions(**options), loss_weights=weights, engram=True, vision=how.get("vision", False))
    if not layout:
        return whole
    groups = {name: ranks_of(layout.get(name, 1)) for name in ("experts", "tables", "context")}
    return part_of(whole, Parallel(**groups, shard_embeddings=layout.get("shard_embeddings", False)))


def step(built: DeepseekV41, batch: dict[str, Tensor], denominators: LossDenominators) -> dict[str, Any]:
    """Two passes, so that several graphs are in flight, and what the first selected."""
    passes = [built.losses(**batch, denominators=denominators) for _ in range(2)]
    for losses in passes:
        losses.total.backward()
    given = ("pixel_values", "image_grid_hws", "vision_token_types")
    with torch.no_grad():
        layout = built.lay_out(**batch)
        trace = built.run_backbone(batch["input_ids"], layout, *(batch.get(name) for name in given))
    shared = [block.shared for block in trace.blocks]
    return {
        "sums": {name: value.detach() for name, value in passes[0]._asdict().items()},
        "gradients": {name: parameter.grad for name, parameter in built.named_parameters()},
        "selected": [state.topk_indices for state in shared if state.topk_indices is not None],
        "candidates": [state.candidates for state in shared if state.candidates is not None],
        "hidden": trace.hidden,
        "places": {
            name: (parameter.shard.start, parameter.shard.stop)
            for name, parameter in built.named_parameters()
            if hasattr(parameter, "shard")
        },
    }


@contextmanager
def without(exchange: str | None) -> Iterator[None]:
    """One of the exchanges left out, as a mistake in the code might."""
    with pytest.MonkeyPatch.context() as patch:
        if exchange in ("window", "open group", "gradient of the halo"):
            own = model.attention.with_halo

            def with_halo(tensors: Sequence[Tensor], plan: HaloPlan, ranks: RankGroup) -> tuple[Tensor, ...]:
                found = own(tensors, plan, ranks)
                if (exchange, len(tensors)) in (("window", 1), ("open group", 2)):
                    return tuple(torch.cat([x[: plan.tokens] * 0, x[plan.tokens :]]) for x in found)
                if exchange == "gradient of the halo":
                    return tuple(torch.cat([x[: plan.tokens].detach(), x[plan.tokens :]]) for x in found)
                return found

            patch.setattr(model.attention, "with_halo", with_halo)
        elif exchange == "entries":
            patch.setattr(context.dist, "all_gather_single", lambda out, rows, group: out.zero_())
        elif exchange == "gradient of the entries":
            patch.setattr(context.dist, "reduce_scatter_single", lambda own, rows, group: own.copy_(rows[: len(own)]))
        elif exchange == "document sums":
            patch.setattr(model.moe, "sum_over", lambda counts, ranks: counts)
        elif exchange == "look-back":
            lost = SequenceLayout.flatten_with_lookback
            patch.setattr(SequenceLayout, "flatten_with_lookback", lambda *given: lost(*given).index_fill(
                0, torch.arange(len(given[0].chunk.lookback)), 5))  # fmt: skip
        elif exchange == "next label":
            patch.setattr(SequenceLayout, "targets", own_labels)
        yield


EXCHANGES = ("window", "open group", "gradient of the halo", "entries", "gradient of the entries", "document sums",
             "look-back", "next label")  # fmt: skip


def own_labels(layout: SequenceLayout, labels: Tensor) -> Tensor:
    flat = layout.flatten(labels)
    return torch.cat([flat[1:], flat.new_full((1,), -100)]).masked_fill(
        layout.position + 1 == layout.document_lengths[layout.document], -100
    )


def train(rank: int, some: list[Case], missing: Sequence[str | None]) -> list[dict[str, Any]]:
    """A step of every case on this rank. `missing`: an exchange to leave out in each, or None. Groups of ranks that
    share rows have the batches of a case in turn.
    """
    switch_rounding_off(setattr)
    found = []
    for (names, layout, how), exchange in zip(some, missing, strict=True):
        built = model_of(layout, how)
        batch = BATCHES[names[rank // layout["context"]]]
        counted = built.loss_denominators(**batch).to_tensor()
        torch.distributed.all_reduce(counted)
        with without(exchange):
            found.append(step(built, batch, LossDenominators.from_tensor(counted)))
    return found


def compare(case: Case, ranks: list[dict[str, Any]]) -> None:
    """Whether the ranks together did what one process does with the batches one after another."""
    names, layout, how = case
    each = alone(tuple(names), tuple(how.items()))
    size = layout["context"]
    for number, expected in enumerate(each):
        group = ranks[number * size : (number + 1) * size]
        torch.testing.assert_close(torch.cat([rank["hidden"] for rank in group]), expected["hidden"], **NOISE)
        for key in ("selected", "candidates"):
            assert {len(rank[key]) for rank in group} == {len(expected[key])}
            for at, whole in enumerate(expected[key]):
                parts = torch.cat([rank[key][at] for rank in group])
                assert torch.equal(parts.sort(-1).values, whole.sort(-1).values), key
        for key, whole in expected["sums"].items():
            ours = sum(rank["sums"][key] for rank in group)
            torch.testing.assert_close(ours, whole, **NOISE, msg=lambda text, key=key: f"{key}: {text}")
    shapes = {name: parameter.shape for name, parameter in model_of({}, how).named_parameters()}
    # Engram's gate has a slope of up to 500 where a stream and its memory are nearly orthogonal
    assert_same(assembled(ranks, shapes), assembled(each, shapes), 5e-4)


@cache
def alone(names: tuple[str, ...], how: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    """What one process finds for each of the batches of a step."""
    built = model_of({}, dict(how))
    counted = sum(built.loss_denominators(**BATCHES[name]).to_tensor() for name in names)
    return [step(model_of({}, dict(how)), BATCHES[name], LossDenominators.from_tensor(counted)) for name in names]


def compare_all(size: int, some: list[Case]) -> None:
    for case, *ranks in zip(some, *processes.run(size, train, some, [None] * len(some)), strict=True):
        try:
            compare(case, ranks)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


PLAIN = {"context": 2}
SPLIT = {**PLAIN, "experts": 2, "tables": 2, "shard_embeddings": True}


def test_two_ranks_equal_one_process(no_rounding) -> None:  # noqa: F811
    """Hidden states, selections, candidates, losses and gradients."""
    vision, recompute = {"vision": True}, {"recompute": True}
    some: list[Case] = [(["inside a group"], PLAIN, {}), (["two rows with padding"], SPLIT, recompute)]
    compare_all(2, [*some, (["image across the cut"], PLAIN, vision)])


@pytest.mark.slow
def test_two_ranks_equal_one_process_wherever_the_cut_is(no_rounding) -> None:  # noqa: F811
    others = [
        (SPLIT, {"recompute": True}),
        (PLAIN, {"attention": "dense", "recompute": True}),
        (PLAIN, {"decoder_replay": True}),
        (PLAIN, {"train_indexer": False}),
    ]
    mixed = ("inside a group", "two rows with padding")
    cases: list[Case] = [([name], PLAIN, {"vision": name not in ROWS}) for name in BATCHES]
    compare_all(2, cases + [([name], layout, how) for name in mixed for layout, how in others])


@pytest.mark.slow
def test_four_ranks_equal_one_process(no_rounding) -> None:  # noqa: F811
    """One group of four, whose chunks can be shorter than the window, and two groups of two with rows of their own."""
    cases = [([name], {"context": 4}, {"vision": name not in ROWS}) for name in BATCHES]
    parts = {"experts": 4, "tables": 4, "shard_embeddings": True}
    cases += [([name], {"context": 4, **parts}, {"recompute": True}) for name in ("inside a group", "one token each")]
    groups = ["inside a group", "two rows with padding"]
    for split in ({}, {"experts": 2, "tables": 2}, parts):
        cases += [(groups, {"context": 2, **split}, {"recompute": bool(split)})]
    compare_all(4, cases)


@pytest.mark.slow
def test_each_exchange_is_needed(no_rounding) -> None:  # noqa: F811
    """Left out on purpose, every one of them makes the comparison fail."""
    case: Case = (["inside a group"], {"context": 2}, {})
    some, missing = [case] * (len(EXCHANGES) + 1), [None, *EXCHANGES]
    for exchange, *ranks in zip(missing, *processes.run(2, train, some, missing), strict=True):
        if exchange is None:
            compare(case, ranks)
            continue
        try:
            compare(case, ranks)
        except AssertionError:
            continue
        pytest.fail(f"nothing differs without this exchange: {exchange}")


def selections(parallel: Parallel) -> list[list[Tensor]]:
    """Of every text batch what each layer selects for this process's tokens, with values rounded as in training."""
    built, found = part_of(model_of({}, {}), parallel), []
    for name in ROWS:
        batch = BATCHES[name]
        with torch.no_grad():
            trace = built.run_backbone(batch["input_ids"], built.lay_out(**batch), None, None, None)
        states = [block.shared.topk_indices for block in trace.blocks]
        found.append([chosen.sort(-1).values for chosen in states if chosen is not None])
    return found


def selections_of_chunks(rank: int) -> list[list[Tensor]]:
    return selections(Parallel(context=ranks_of(2)))


@pytest.mark.slow
def test_with_rounding_hardly_a_query_selects_otherwise() -> None:
    """Where the last bit of a sum decides a rounding, a selection may differ: of at most one query in a hundred. (Of
    1,415 on the machine where this was written, none did.)
    """
    same, wholes = [], selections(Parallel())
    for one, other, whole in zip(*processes.run(2, selections_of_chunks), wholes, strict=True):
        same += [(torch.cat(parts) == chosen).all(-1) for *parts, chosen in zip(one, other, whole, strict=True)]
    queries = torch.cat(same)
    assert len(queries) > 1000 and queries.float().mean() >= 0.99


def step_of_both(rank: int) -> list[dict[str, Any]]:
    """A step of this rank's chunk with plain and with packed gathers, in fp32 and in bf16."""
    found, ranks = [], Parallel(context=ranks_of(2))
    for bf16 in (False, True):
        for gather in ("plain", "packed"):
            built = part_of(tiny_model(ForwardOptions(gather=gather), engram=True), ranks)
            batch = BATCHES["two rows with padding"]
            counted = built.loss_denominators(**batch).to_tensor()
            torch.distributed.all_reduce(counted)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                found.append(step(built, batch, LossDenominators.from_tensor(counted)))
    return found


@pytest.mark.slow
def test_packed_gathers_change_no_bit_of_a_step() -> None:
    for ranks in processes.run(2, step_of_both):
        for plain, packed in (ranks[:2], ranks[2:]):
            torch.testing.assert_close(packed, plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_entries_are_the_values_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks with 5 and 3 slots; among the values are zeros, the smallest and very large ones."""
    g, sent = torch.Generator().manual_seed(0), []
    size = 10.0 ** torch.randint(-6, 6, (5, 1), generator=g)
    kv = KV_MAIN.fake_quant((torch.randn(5, 512, generator=g) * size).to(dtype))
    keys = KV_INDEX.fake_quant((torch.randn(5, 128, generator=g) * size).to(dtype))
    kv[1], keys[2] = 0, 0

    def gather(out: Tensor, rows: Tensor, group: object) -> None:
        sent.append(rows.nbytes // len(rows))
        out.copy_(rows.repeat(2, 1))

    monkeypatch.setattr(context.dist, "all_gather_single", gather)
    given = (kv, keys, GatherPlan((5, 3)), RankGroup(None, 0, 2))
    plain, packed = context.gather_entries(*given), context.gather_entries(*given, packed=KV_MAIN)
    for values, found, x in zip(plain, packed, (kv, keys), strict=False):
        assert torch.equal(values, torch.cat([x, x[:3]])) and found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert sent == [640 * dtype.itemsize, 356]


GOLDEN = ("text", "engram", "padded", "packed", "vision", "detail/c2_images_engram_pad")


def golden(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """In every golden case: logits of this rank's tokens (zero elsewhere), and its loss and number of targets."""
    ranks, found = ranks_of(2), []
    for name in GOLDEN:
        oracle = load_oracle(name)
        built, inputs = load_pretrained(oracle.folder, parallel=Parallel(context=ranks)), oracle.inputs
        with torch.no_grad():
            losses = built.losses(**inputs, denominators=built.loss_denominators(**inputs))
            found.append((built(**inputs).logits, losses.lm_sum, losses.supervised))
    return found


@pytest.mark.slow
def test_golden_cases() -> None:
    """In chunks on two ranks against two other implementations, by the rules of test_golden.py for plain runs."""
    for name, one, other in zip(GOLDEN, *processes.run(2, golden), strict=True):
        oracle = load_oracle(name)
        (logits, nats, targets), (more_logits, more_nats, more_targets) = one, other
        assert logits.any() and more_logits.any() and not (logits * more_logits).any(), name
        per_token = (logits + more_logits - oracle.expected["logits"])[oracle.real].abs().amax(-1)
        assert per_token.quantile(0.25) <= 3e-5, name
        assert abs((nats + more_nats) / (targets + more_targets) - oracle.expected["loss"]) <= 1e-2, name


def test_a_chunk_does_not_keep_the_whole_layout_in_memory() -> None:
    built = tiny_model(vision=True)
    built.parallel = Parallel(context=RankGroup(None, 3, 8))
    layout = built.lay_out(tokens(1, 4000), vision_token_types=torch.full((1, 4000), -1))
    held = [layout, layout.chunk, *layout.entries.values()]
    tensors = [x for part in held for x in vars(part).values() if isinstance(x, Tensor)]
    assert layout.tokens == 500 and len(tensors) >= 20
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in tensors)
    assert all(x.base is None for entries in layout.entries.values() for x in (entries.host_from, entries.host_to))


def test_a_wrong_number_of_image_tokens_is_refused_in_a_chunk() -> None:
    built = tiny_model(vision=True)
    built.parallel = Parallel(context=RankGroup(None, 0, 2))
    batch = BATCHES["images on one side"]
    types = batch["vision_token_types"].masked_fill(batch["vision_token_types"] == 2, 1)
    layout = built.lay_out(batch["input_ids"], vision_token_types=types)
    with pytest.raises(ValueError, match="the batch has 3 IMAGE tokens, but its images give 2"):
        built.run_backbone(batch["input_ids"], layout, batch["pixel_values"], batch["image_grid_hws"], types)


def held_bytes(value: Any, found: dict[int, int]) -> dict[int, int]:
    """Bytes of every storage that the tensors and arrays of a layout keep in memory, by address."""
    if isinstance(value, Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        found[value.__array_interface__["data"][0]] = (value if value.base is None else value.base).nbytes
    elif isinstance(value, dict):
        for part in value.values():
            held_bytes(part, found)
    elif is_dataclass(value):
        for field in fields(value):
            held_bytes(getattr(value, field.name), found)
    return found


def test_a_rank_keeps_only_its_part_of_a_rows_layout() -> None:
    """The layout of all tokens has 192 bytes a token here, a rank's chunk 240: 48 more for the positions in the batch,
    a second window start and the host's ranges of slots, which the layout of all tokens leaves out or shares.
    """
    config, length, ranks = tiny_model(ForwardOptions()).config.text, 2**14, 16
    whole = build_layout(config, tokens(1, length, seed=1))
    assert sum(held_bytes(whole, {}).values()) == pytest.approx(192 * length, abs=1024)
    for rank in range(ranks):
        own = chunk_of(whole, config, RankGroup(None, rank, ranks))
        assert sum(held_bytes(own, {}).values()) == pytest.approx(240 * length / ranks, abs=1024)
