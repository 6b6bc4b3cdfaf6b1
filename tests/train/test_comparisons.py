"""Settings that studies compare: router balance, a frozen indexer, the tables' rate; and what evaluations measure."""

from __future__ import annotations

import itertools

import pytest
import torch

from model import indexer_recall
from optim import load_statistics
from tests.model.tiny import no_rounding  # noqa: F401
from train import loop
from train.build import Run, build
from train.evaluation import probe
from train.evaluation.evaluate import evaluate


def steps(run: Run, count: int) -> list[dict]:
    batches = iter(run.train_batches)
    size = run.micro_batches
    return [loop.train_step(run, list(itertools.islice(batches, size)), step, 0) for step in range(count)]


def test_shared_balance_moves_both_biases_by_the_whole_load(make_config) -> None:
    run = build(make_config("optim.router_bias_mode=shared", "optim.router_bias_rate=0.25"))
    load = torch.tensor([[4, 0, 0, 4], [0, 8, 1, 1]]).expand(len(run.model.router_biases()), 2, 4)
    loop.balance_routers(run, load)
    for text, image in run.model.router_biases():  # totals 4, 8, 1, 5; mean 4.5
        assert text.tolist() == image.tolist() == [0.25, -0.25, 0.25, -0.25]


def test_no_balance_moves_no_bias(make_config) -> None:
    run = build(make_config("optim.router_bias_mode=off", "optim.router_bias_rate=0.25"))
    steps(run, 2)
    assert not any(bias.any() for pair in run.model.router_biases() for bias in pair)


def test_a_frozen_indexer_keeps_its_weights_and_has_no_place_in_the_optimizer(make_config) -> None:
    run = build(make_config("runtime.train_indexer=false"))
    before = {name: tensor.clone() for name, tensor in run.model.named_parameters()}
    numbers = steps(run, 2)
    for name, tensor in run.model.named_parameters():
        assert torch.equal(tensor, before[name]) == (".indexer." in name), name
    names = {row.parameter for row in run.optimizer.table()}
    assert names == {name for name in before if ".indexer." not in name}
    assert numbers[-1]["index_kl_sum"].eq(0).all()


def test_the_factors_of_the_tables(make_config) -> None:
    report = ["optim.rules=report", "optim.tables_lr_factor=0.5"]
    for rules, embed, engram in ((report, 0.5, 1.5), (["optim.rules=adamw"], 1.0, 3.0)):
        run = build(make_config(*rules, "optim.engram_lr_factor=3.0"))
        rows = {row.parameter: row for row in run.optimizer.table()}
        assert rows["embed.weight"].lr_factor == rows["head.weight"].lr_factor == embed
        assert rows["layers.1.engram.embed.weight"].lr_factor == engram
        assert rows["layers.1.attn.wq_a.weight"].lr_factor == 1.0


def test_an_evaluation_measures_the_load_of_all_rows(make_config) -> None:
    run = build(make_config())
    result = evaluate(run)
    batches = list(run.valid_batches)
    with torch.no_grad():
        load = sum(
            run.model.losses(**batch, denominators=run.model.loss_denominators(**batch)).expert_load
            for batch in batches
        )
    assert result["expert_load"]["text"]["max_over_mean"] == load_statistics(load)[0][:, 0].tolist()


@pytest.mark.parametrize(("rows", "limit"), [(1, 400), (2, 400), (2, 200)])
def test_recall_is_that_of_the_first_documents_however_they_come(make_config, monkeypatch, rows, limit) -> None:
    """Several processes make batches of more rows."""

    def evaluated(rows: int) -> tuple[Run, list[float]]:
        run = build(make_config("data.validation_rows=4", f"task.micro_batch={rows}", "task.global_batch_rows=4"))
        return run, evaluate(run)["index_recall"]

    monkeypatch.setattr(probe, "PROBE_TOKENS", limit)
    run, whole = evaluated(4)
    (batch,) = run.valid_batches
    end = batch["seq_lens"].flatten().cumsum(0).view_as(batch["seq_lens"])
    kept = torch.where(end <= limit, batch["seq_lens"], 0)
    assert (limit == 400) == bool((kept == batch["seq_lens"]).all()) and (kept > 0).any(1).sum() > 2
    expected = indexer_recall(run.model, {**batch, "seq_lens": kept})
    assert whole == pytest.approx(expected.tolist(), rel=1e-4) and all(0 < value <= 1 for value in whole)
    assert evaluated(rows)[1] == pytest.approx(whole, rel=1e-4)


def probed(run: Run, limit: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, list]:
    """The batch that recall is measured on, and the recall."""
    seen = []

    def look(model, batch, reduce):
        seen.append(batch)
        return indexer_recall(model, batch, reduce)

    monkeypatch.setattr(probe, "PROBE_TOKENS", limit)
    monkeypatch.setattr(probe, "indexer_recall", look)
    batch, measured = next(iter(run.valid_batches)), probe.Probe(run)
    measured.add(batch)
    return batch, [measured.recall, *seen]


def test_recall_is_measured_on_so_many_tokens_at_most(no_rounding, make_config, monkeypatch) -> None:  # noqa: F811
    run = build(make_config("data.validation_rows=2"))
    batch, (recall, seen) = probed(run, 40, monkeypatch)
    assert batch["seq_lens"].sum() > 100 and 0 < seen["seq_lens"].sum() <= 40
    first = int(seen["seq_lens"].flatten()[0])
    alone = {name: batch[name][:1, :first] for name in ("input_ids", "labels")}
    if seen["seq_lens"].count_nonzero() == 1:
        expected = indexer_recall(run.model, {**alone, "seq_lens": torch.tensor([[first]])})
        torch.testing.assert_close(torch.tensor(recall), expected, rtol=1e-4, atol=1e-5)
    few = probe.Probe(build(make_config("model.text_config.index_topk=64")))
    few.add(batch)
    assert few.recall == [None] * len(recall)  # nobody sees more than 64 entries


@pytest.mark.slow
def test_recall_on_images_takes_the_pixels_of_the_documents_it_keeps(make_config, monkeypatch) -> None:
    run = build(
        make_config("experiment=study_digits", "model=study_vision", "data.source=digits", "data.paths=[]",
                    "data.validation_paths=[]", "data.tokenizer=train", "model.text_config.vocab_size=512")
    )  # fmt: skip
    batch, (recall, seen) = probed(run, 60, monkeypatch)
    kept = int(seen["seq_lens"].count_nonzero())
    assert 0 < kept < batch["seq_lens"].count_nonzero()
    assert len(seen["image_grid_hws"]) == kept and len(seen["pixel_values"]) == 16 * kept
    assert len(recall) == 3
