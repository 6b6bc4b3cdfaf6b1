"""A training step: micro-batches, recomputation, router balance, and the stop on numbers that are none."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from threading import current_thread

import pytest
import torch

from tests.model.tiny import no_rounding  # noqa: F401
from train import loop
from train.build import Run, build
from train.checkpoint.run_state import TrainerState
from train.config.parse import parse
from train.errors import NonFiniteError
from train.evaluation.evaluate import evaluate
from train.tasks import pretrain


def step_of(run: Run, step: int = 0) -> dict:
    batches = list(itertools.islice(iter(run.train_batches), run.micro_batches))
    return loop.train_step(run, batches, step, 0)


def parameters(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def gradients(run: Run, batches: list) -> dict[str, torch.Tensor]:
    """What the optimizer gets to see in a training step."""
    found = {}

    def look() -> None:
        found.update({name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None})

    run.optimizer.step = look
    loop.train_step(run, batches, 0, 0)
    return found


def test_layouts_are_computed_by_the_thread_that_reads(make_config, monkeypatch) -> None:
    """Which also copies batch and layout to pinned memory if the model is on a GPU."""
    run = build(make_config())
    where, pinned, lay_out = [], [], run.model.lay_out
    monkeypatch.setattr(run.model, "lay_out", lambda **batch: where.append(current_thread().name) or lay_out(**batch))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    seen = []
    take = loop.over_batches(run, TrainerState(), lambda read, *_: seen.extend(read) or {"stop": False})
    take(lambda: False)
    assert len(seen) == run.micro_batches
    loop.train_step(run, seen, 0, 0)
    assert set(where) == {"batches_0"} and not pinned
    on_gpu = dataclasses.replace(run, world=dataclasses.replace(run.world, device=torch.device("cuda")))
    ready = on_gpu.lay_out({name: x for name, x in seen[0].items() if name != "layout"})
    held = [ready["layout"].position, ready["layout"].entries[1].members, ready["input_ids"]]
    assert all(any(x is one for one in pinned) for x in held)


def test_whether_to_stop_costs_no_exchange_of_its_own(make_config, monkeypatch) -> None:
    """It is asked once before the first step, and then sums with the losses; the run stops after the step in which it
    was asked to."""
    run, state = build(make_config()), TrainerState()
    asked, summed, stop = [], [], []
    monkeypatch.setattr(type(run.world), "any", lambda world, flag: asked.append(flag) or flag)
    sum_all = type(run.world).sum_all
    monkeypatch.setattr(type(run.world), "sum_all", lambda world, sums: summed.append(sums) or sum_all(world, sums))

    def step(read, waited, started, stopped):
        numbers = loop.train_step(run, read, state.step, state.tokens, stopped=stopped)
        return loop.pretrain_record(run, state, numbers, waited, started)

    take = loop.over_batches(run, state, step)
    assert "stop" not in take(lambda: False) and asked == [False]
    assert take(lambda: bool(stop)) is not None
    stop.append("SIGTERM")
    assert take(lambda: bool(stop)) is not None and state.step == 3
    assert take(lambda: bool(stop)) is None and state.step == 3 and asked == [False]
    assert [int(sums["stop"]) for sums in summed] == [0, 0, 1]


def uneven(batches: list) -> list:
    """Supervision on a different share of every row, so that a mean of micro-batch means would be wrong."""
    rows = itertools.count(1)
    for batch in batches:
        for row in batch["labels"]:
            row[: 10 * next(rows)] = -100
    return batches


def test_accumulated_gradient_equals_the_larger_batch(no_rounding, make_config) -> None:  # noqa: F811
    split = build(make_config("task.micro_batch=1", "task.global_batch_rows=4", "optim.clip=1000.0"))
    whole = build(make_config("task.micro_batch=4", "task.global_batch_rows=4", "optim.clip=1000.0"))
    small = uneven([next(iter(split.train_batches)) for _ in range(4)])
    large = uneven([next(iter(whole.train_batches))])
    assert torch.equal(torch.cat([b["input_ids"] for b in small]), large[0]["input_ids"])
    expected, found = gradients(whole, large), gradients(split, small)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        limit = 1e-5 if ".engram." in name else 1e-6  # its gate's square root near zero magnifies rounding
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_micro_batches_of_a_step_report_the_larger_batch(no_rounding, make_config) -> None:  # noqa: F811
    records = [step_of(build(make_config(f"task.micro_batch={m}", "task.global_batch_rows=4"))) for m in (1, 4)]
    torch.testing.assert_close(records[0]["total"], records[1]["total"], rtol=1e-5, atol=1e-6)
    for name in ("supervised", "num_tokens", "index_queries", "expert_load"):
        assert torch.equal(records[0][name], records[1][name]), name


def test_recomputation_changes_no_number(make_config) -> None:
    runs = [build(make_config(f"runtime.recompute={on}")) for on in ("false", "true")]
    for step in range(2):
        plain, again = (step_of(run, step) for run in runs)
        assert torch.equal(plain["total"], again["total"])
        assert torch.equal(plain["expert_load"], again["expert_load"])
    for (name, a), b in zip(runs[0].model.state_dict().items(), runs[1].model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_router_biases_move_once_a_step_towards_balance(make_config) -> None:
    run = build(make_config("optim.router_bias_rate=0.25"))
    load = step_of(run)["expert_load"]
    for layer, (text, image) in enumerate(run.model.router_biases()):
        counts = load[layer, 0].float()
        assert torch.equal(text, 0.25 * torch.sign(counts.mean() - counts))
        assert not image.any(), "no image tokens, no movement"


def test_evaluation_leaves_no_trace(make_config) -> None:
    run = build(make_config())
    before, random = parameters(run), torch.get_rng_state()
    first, second = evaluate(run), evaluate(run)
    assert first["loss"] == second["loss"] and first["targets"] > 0
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    assert all(p.grad is None for p in run.model.parameters())


def test_bits_per_byte_follow_from_nats_and_bytes(make_config) -> None:
    run = build(make_config())
    result = evaluate(run)
    valid = run.valid_batches
    assert result["targets"] == valid.target_tokens
    bits = result["loss"] * valid.target_tokens / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    assert result["bits_per_byte"] == pytest.approx(bits / valid.target_bytes, rel=1e-6)


def test_the_log_has_tokens_epochs_and_loss_of_every_source(
    compose_raw, overrides, corpus: Path, tmp_path: Path
) -> None:
    kept = [text for text in overrides if not text.startswith(("data.source", "data.paths", "data.validation"))]
    files = f"source: text, paths: ['{corpus}'], validation_paths: ['{corpus}/token.txt'], validation_rows: 4"
    mixture = f"data.mixture={{a: {{weight: 3, {files}}}, b: {{weight: 1, {files}, streaming: true}}}}"
    config = parse(compose_raw(*kept, f"output={tmp_path}", mixture))
    pretrain.run(config)
    records = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained, valid = ([r for r in records if r["kind"] == kind] for kind in ("train", "valid"))
    for record in trained:
        sources = record["sources"]
        assert sum(source["tokens"] for source in sources.values()) == record["tokens"]
        assert sum(source["rows"] for source in sources.values()) == 4 * record["step"]
    assert trained[-1]["sources"]["a"]["tokens"] > trained[-1]["sources"]["b"]["tokens"] > 0
    assert all(0 <= source["epochs"] < 1 for source in trained[-1]["sources"].values())
    assert all(4 < source["loss"] < 8 for record in valid for source in record["sources"].values())


def test_a_step_without_targets_reports_numbers_that_json_has(make_config) -> None:
    run = build(make_config())
    batches = list(itertools.islice(iter(run.train_batches), run.micro_batches))
    for batch in batches:
        batch["labels"].fill_(-100)
    record = loop.pretrain_record(run, TrainerState(), loop.train_step(run, batches, 0, 0), 0.0, 0.0)
    assert record["loss"] is None
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("where", ["loss", "gradient norm"])
def test_non_finite_numbers_stop_before_the_update(make_config, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    run = build(make_config())
    step_of(run)
    if where == "loss":
        with torch.no_grad():
            next(p for name, p in run.model.named_parameters() if name == "head.weight").fill_(float("nan"))
    else:
        run.model.embed.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = parameters(run)
    optimizer = {key: value.clone() for key, value in flat_tensors(run.optimizer.state_dict())}
    with pytest.raises(NonFiniteError, match=f"the {where} is (nan|inf) at step 2; the update was not applied"):
        step_of(run, 1)
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(value, optimizer[key]) for key, value in flat_tensors(run.optimizer.state_dict()))


def flat_tensors(tree: object, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(prefix, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [pair for key, value in items for pair in flat_tensors(value, f"{prefix}.{key}")]


def test_bf16_autocast_trains_and_keeps_fp32_parameters(make_config) -> None:
    run = build(make_config("parallel.precision=bf16"))
    exact = build(make_config())
    for step in range(3):
        lossy, full = step_of(run, step)["total"], step_of(exact, step)["total"]
        torch.testing.assert_close(lossy, full, rtol=0.02, atol=0.02)
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(run.model.parameters(), exact.model.parameters(), strict=True))
