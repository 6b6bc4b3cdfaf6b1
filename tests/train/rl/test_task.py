"""task=rl as a whole, on a tiny model: the same policy in rollout and training, determinism, resuming, refusals."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model import load_pretrained
from tests.model.tiny import no_rounding  # noqa: F401
from train.build import build
from train.checkpoint.run_state import TrainerState, latest
from train.config.problems import ConfigError
from train.config.schema import Config
from train.errors import InputError, Interrupted
from train.loop import train_step
from train.rl.batch import Shape, batches, empty_batch, score
from train.rl.collect import Collector
from train.rl.reference import Copy, log_probs_under
from train.session import begin
from train.tasks import rl


@pytest.fixture
def make_policy(make_rl, policy_of):
    """``make_policy("key=value", ...)``: the objects of a run that has not begun."""
    return lambda *changes: policy_of(make_rl(*changes))


def records(config: Config) -> list[dict]:
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "collect_seconds", "tokens_per_second"):
            line.pop(name, None)
    return lines


def weights(config: Config) -> dict[str, torch.Tensor]:
    run = build(config)
    run.resume(latest(config.run_dir / "checkpoints"))
    return run.model.state_dict()


def assert_same_run(a: Config, b: Config) -> None:
    assert records(a) == records(b)
    ours, theirs = weights(a), weights(b)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_training_sees_the_log_probabilities_of_the_rollout(make_policy, temperature: float) -> None:
    """Same selection, same quantisation, and with replay the same experts, even when the router's biases have moved
    since: within 1e-4, but for the few tokens that see a value on a rounding edge.
    """
    policy = make_policy(f"rl.temperature={temperature}")
    settings = policy.run.config.rl
    groups = policy.collector.collect()
    scored = score(groups, settings.length, settings.trained)
    assert scored.informative.any()
    made, counts = batches(scored, scored.informative, policy.shape, version=0)
    assert counts["stale_tokens"] == 0
    draw = torch.Generator().manual_seed(0)
    for bias, _ in policy.run.model.router_biases():
        bias += torch.randn(bias.shape, generator=draw)
    taught, within, without = 0, 0, 0.0
    for batch in made:
        seen = log_probs_under(policy.run.model, batch, temperature, routing_replay=True)
        mask = batch["labels"] >= 0
        within += int(((seen - batch["old_log_probs"])[mask].abs() < 1e-4).sum())
        other = log_probs_under(policy.run.model, batch, temperature)
        without = max(without, float((other - batch["old_log_probs"])[mask].abs().max()))
        assert (batch["routing"][~mask & (batch["input_ids"] == policy.shape.pad)] == -1).all()
        taught += int(mask.sum())
    texts = [r.sample for r, chosen in zip(scored.responses, scored.informative, strict=True) if chosen]
    assert taught == sum(len(sample.tokens) for sample in texts) and within >= 0.7 * taught
    assert without > 1e-2, "without replay the other experts are seen"


def test_batches_hold_every_response_once_with_its_own_advantage(make_policy) -> None:
    policy = make_policy()
    settings = policy.run.config.rl
    scored = score(policy.collector.collect(), settings.length, settings.trained)
    made, _ = batches(scored, scored.informative, policy.shape, version=0)
    found = []
    for batch in made:
        for row in range(len(batch["seq_lens"])):
            at = 0
            for size in filter(None, batch["seq_lens"][row].tolist()):
                names = ("input_ids", "labels", "advantage", "old_log_probs", "response")
                ids, labels, advantage, old, response = (batch[name][row, at : at + size] for name in names)
                mask = labels >= 0
                assert torch.equal(labels[mask], ids[mask]) and len(response.unique()) == 1
                found.append((ids.tolist(), old[mask].tolist(), float(advantage[-1])))
                at += size
        assert len(batch["response"][batch["labels"] >= 0].unique()) == (batch["seq_lens"] > 0).sum()
    expected = [
        ([*response.sample.request.prompt, *response.sample.tokens], response.sample.log_probs, float(advantage))
        for response, advantage, taught in zip(scored.responses, scored.advantages, scored.informative, strict=True)
        if taught
    ]
    assert sorted(found) == [(ids, pytest.approx(old), pytest.approx(a)) for ids, old, a in sorted(expected)]


def test_stale_tokens_are_not_taught(make_policy) -> None:
    policy = make_policy("rl.staleness=1")
    settings = policy.run.config.rl
    scored = score(policy.collector.collect(), settings.length, settings.trained)
    for response in scored.responses:
        sample = response.sample
        sample.versions = [3 if n < 2 else 4 for n in range(len(sample.tokens))]
    all_made, _ = batches(scored, scored.informative, policy.shape, version=4)
    all_taught = sum(int((b["labels"] >= 0).sum()) for b in all_made)
    made, counts = batches(scored, scored.informative, policy.shape, version=5)
    left = sum(int((b["labels"] >= 0).sum()) for b in made)
    teaching = int(scored.informative.sum())
    assert counts["stale_tokens"] == all_taught - left == 2 * teaching
    assert batches(scored, scored.informative, policy.shape, version=9)[1]["stale_tokens"] == all_taught


def test_stale_beginnings_do_not_move_the_end_of_the_prompt(no_rounding, make_policy) -> None:  # noqa: F811
    """The decoder's windows begin with the last tokens of the prompt, whichever tokens of the response are taught."""
    policy = make_policy("runtime.decoder_replay=true", "rl.staleness=0")
    settings, text = policy.run.config.rl, policy.run.model_config.text
    scored = score(policy.collector.collect(), settings.length, settings.trained)
    for sample in (response.sample for response in scored.responses):
        assert len(sample.request.prompt) > text.sliding_window
        sample.versions = [0 if n < 3 else 1 for n in range(len(sample.tokens))]
    made, counts = batches(scored, scored.informative, policy.shape, version=1)
    assert counts["stale_tokens"] > 0
    for batch in made:
        seen = log_probs_under(policy.run.model, batch, settings.temperature, routing_replay=True)
        assert ((seen - batch["old_log_probs"])[batch["labels"] >= 0].abs() < 1e-4).all()


@pytest.mark.slow
def test_a_run_reports_its_measures_and_changes_the_policy(make_rl) -> None:
    config = make_rl("checkpoint.export=plain", "rl.loss.kl=0.01")
    rl.run(config)
    first, *steps, last = records(config)
    assert len(steps) >= 2 and first["efforts"].keys() == last["efforts"].keys() == {"20", "50"}
    for step in steps:
        assert step["efforts"].keys() == {"20", "80"} and step["responses"] == 12 and step["groups"] == 4
        assert {
            "reward",
            "accuracy",
            "length",
            "zero_variance",
            "stale",
            "off_policy",
            "clipped",
            "kl",
            "entropy",
        } <= step.keys()
        assert step["version_lag"] == 0 and step["ratio"] == pytest.approx(1, abs=1e-3)
        for values in step["efforts"].values():
            assert 0 <= values["accuracy"] <= 1 and values["reward"] <= values["task_reward"]
    assert abs(steps[0]["kl"]) < 1e-6 < steps[-1]["kl"], "the reference is the policy at the start"
    assert steps[-1]["tokens"] == last["tokens"] >= config.task.tokens > steps[-2]["tokens"]
    log = (config.run_dir / "train.log").read_text()
    assert "| effort | reward before | reward after |" in log and (config.run_dir / "rl.png").is_file()
    assert (config.run_dir / "export" / "config.json").is_file()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_one_does_not(make_rl) -> None:
    a, b, c = make_rl("name=a"), make_rl("name=b"), make_rl("name=c", "seed=1")
    for config in (a, b, c):
        rl.run(config)
    assert_same_run(a, b)
    assert records(a) != records(c)


AHEAD = ["rl.ahead=1.0", "rl.in_flight=12", "task.tokens=2500"]


def interrupt(monkeypatch, version: int, polls: int) -> None:
    """SIGTERM after so many tokens under the policy of this version."""
    inner, count = rl.LocalRollout.poll, iter(range(10**6))

    def poll(self):
        if self.generator.version == version and next(count) == polls:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self)

    monkeypatch.setattr(rl.LocalRollout, "poll", poll)


@pytest.mark.slow
def test_a_run_stopped_while_responses_are_written_goes_on_exactly(make_rl, monkeypatch) -> None:
    """With responses begun under older policies, and for later steps, in flight."""
    rl.run(make_rl("name=whole", *AHEAD))
    whole = make_rl("name=whole", *AHEAD)
    steps = [record for record in records(whole) if record["kind"] == "train"]
    assert any(step["version_lag"] > 0 for step in steps), "some tokens come from older policies"
    split = make_rl("name=split", *AHEAD)
    with monkeypatch.context() as patch:
        interrupt(patch, version=1, polls=2)
        with pytest.raises(Interrupted):
            rl.run(split)
    (path,) = (split.run_dir / "rollout").glob("step-*.pt")
    state = torch.load(path, weights_only=True)
    running = state["rollout"]["running"]
    assert any(sample["tokens"] for sample in running), "responses were stopped in the middle"
    assert state["next"] > 0
    rl.run(split)
    assert_same_run(whole, split)


def interrupt_evaluation(monkeypatch, number: int) -> None:
    """SIGTERM after two tokens of an evaluation, counted from this start of the run."""
    inner, apart, begun = rl.LocalRollout.poll, rl.LocalRollout.apart, []

    def begin(self):
        begun.append([apart(self), 0])
        return begun[-1][0]

    def poll(self):
        if len(begun) == number + 1 and begun[number][0] is self:
            begun[number][1] += 1
            if begun[number][1] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return inner(self)

    monkeypatch.setattr(rl.LocalRollout, "apart", begin)
    monkeypatch.setattr(rl.LocalRollout, "poll", poll)


@pytest.mark.slow
def test_a_run_stopped_while_it_is_evaluated_evaluates_anew(make_rl, monkeypatch) -> None:
    """Before the first step, in between, and behind the last."""
    changes = ["task.tokens=900", "task.eval_every=1"]
    rl.run(make_rl("name=whole", *changes))
    split = make_rl("name=split", *changes)
    for number, written in ((0, []), (1, ["valid", "train"]), (1, ["valid", "train"] * 2)):
        with monkeypatch.context() as patch:
            interrupt_evaluation(patch, number)
            with pytest.raises(Interrupted, match="Stopped by SIGTERM after step"):
                rl.run(split)
        assert [record["kind"] for record in records(split)] == written
    rl.run(split)
    assert_same_run(make_rl("name=whole", *changes), split)
    assert [record["kind"] for record in records(split)] == [*["valid", "train"] * 2, "valid"]


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly_from_its_last_checkpoint(make_rl, monkeypatch) -> None:
    rl.run(make_rl("name=whole", *AHEAD))
    split = make_rl("name=split", *AHEAD)

    class Killed(BaseException):
        pass

    inner, count = rl.step, iter(range(100))

    def step(*arguments):
        if next(count) == 2:
            raise Killed
        return inner(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "step", step)
        with pytest.raises(Killed):
            rl.run(split)
    rl.run(split)
    assert_same_run(make_rl("name=whole", *AHEAD), split)


@pytest.mark.slow
def test_rollout_files_are_kept_as_long_as_their_checkpoints(make_rl) -> None:
    config = make_rl("checkpoint.keep=2", "task.tokens=2500")
    rl.run(config)
    steps = {path.name for path in (config.run_dir / "checkpoints").glob("step-*")}
    assert {path.name.split(".")[0] for path in (config.run_dir / "rollout").iterdir()} == steps and len(steps) == 2


@pytest.mark.slow
def test_a_damaged_rollout_file_is_named(make_rl) -> None:
    config = make_rl("name=damaged")
    rl.run(config)
    path = max((config.run_dir / "rollout").glob("*.pt"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} cannot be read.*delete the file and that checkpoint"):
        rl.run(make_rl("name=damaged", "task.tokens=9000"))


@pytest.mark.slow
def test_a_step_in_which_nothing_differs_updates_nothing_and_counts(make_rl, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def grade(record, answer, reasoning):\n    return 1.0\n")
    task = f"{{prompts: '{prompts}/prompts.jsonl', reward: '{tmp_path}/same.py:grade'}}"
    free = "rl.length={c_max: 0.5, k0: 0.0, l_norm: 16.0, spread: 1.0}"
    config = make_rl("name=same", f"rl.tasks=[{task}]", free, "rl.max_tokens=2", "task.tokens=1300")
    rl.run(config)
    steps = [record for record in records(config) if record["kind"] == "train"]
    assert all(step["zero_variance"] == step["groups"] == 4 and "loss" not in step for step in steps) and len(steps) > 1
    run = build(config)
    begin(run)
    assert all(torch.equal(run.model.state_dict()[name], tensor) for name, tensor in weights(config).items())


def test_a_batch_of_nothing_teaches_nothing(make_policy) -> None:
    policy = make_policy()
    batch = {k: v for k, v in empty_batch(policy.shape).items() if k in ("input_ids", "labels", "seq_lens", "routing")}
    model = policy.run.model
    assert model.loss_denominators(**batch).supervised == 0
    losses = model.losses(**batch, denominators=model.loss_denominators(**batch))
    assert losses.lm_sum == 0 and torch.isfinite(losses.total)


def test_a_batch_that_fills_up_changes_nothing(make_policy) -> None:
    """A process with fewer batches than others: the same losses, gradients, expert load and biases without it."""
    found = []
    for dummy_batches in (0, 1):
        policy = make_policy()
        settings = policy.run.config.rl
        scored = score(policy.collector.collect(), settings.length, settings.trained)
        made, _ = batches(scored, scored.informative, policy.shape, version=0)
        policy.run.model.loss_weights = replace(policy.run.model.loss_weights, router_balance=1.0)
        made += [empty_batch(policy.shape)] * dummy_batches
        numbers = train_step(policy.run, made, 0, 0, policy.method.losses_of({}), dummy_batches)
        found.append({**numbers, **policy.run.model.state_dict()})
    without, filled = found
    assert without["num_tokens"] and without["expert_load"].any()
    assert all(torch.equal(torch.as_tensor(without[name]), torch.as_tensor(filled[name])) for name in without)


@pytest.mark.slow
def test_failing_rewards_are_counted_in_the_log(make_rl, prompts: Path, tmp_path: Path) -> None:
    code = "def grade(record, answer, reasoning):\n    return 1.0 if len(answer) < 2 else {}[answer]\n"
    (tmp_path / "bad.py").write_text(code)
    task = f"{{prompts: '{prompts}/prompts.jsonl', reward: '{tmp_path}/bad.py:grade'}}"
    config = make_rl("name=bad", f"rl.tasks=[{task}]", "task.tokens=600")
    rl.run(config)
    failed = [record["failures"]["error"] for record in records(config) if record["kind"] == "train"]
    assert failed and all(count > 0 for count in failed)
    log = (config.run_dir / "train.log").read_text()
    assert "reward_error=" in log
    assert log.count("rl.tasks[0].reward failed, which counts as a reward of 0: KeyError: ") == 1


@pytest.mark.slow
def test_a_reward_that_only_fails_ends_the_run_before_a_step(make_rl, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("async def grade(record, answer, reasoning):\n    raise KeyError(answer)\n")
    config = make_rl(
        "name=bad", f"rl.tasks=[{{prompts: '{prompts}/prompts.jsonl', reward: '{tmp_path}/bad.py:grade'}}]"
    )
    with pytest.raises(InputError, match=r"rl.tasks\[0\].reward failed in every call of the last step .*KeyError"):
        rl.run(config)
    assert all(record["kind"] != "train" for record in records(config))


def test_a_reward_may_fail_for_some_steps_once_it_has_worked() -> None:
    good, bad, silent = (0, "", ""), (0, "error", "KeyError: 'a'"), (1, "", "")
    failing = rl.Failing(2)
    for step in ([good, bad], [bad], [bad], [good], [bad], [bad], [silent]):
        failing.check([step, []])
    with pytest.raises(InputError, match="3 steps in a row"):
        failing.check([[], [bad]])
    with pytest.raises(InputError, match=r"rl.tasks\[1\].*the last step \(2 in the last one\)"):
        rl.Failing(2).check([[good], [(1, "time", "no answer"), (1, "time", "no answer")]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rl.efforts=[20,true]", "rl.efforts"),
        ("rl.efforts=[0,20]", "rl.efforts: effort=0: must be one of"),
        ("rl.efforts=[20,101]", "effort=101"),
        ("rl.efforts=[20,50abc]", "effort='50abc'"),
        ("rl.eval_efforts=[]", "rl.eval_efforts: efforts=.* at least one effort"),
        ("rl.samples=[3]", "rl.samples = .3.: must have one number for each of the 2 efforts"),
        ("rl.samples=[1,3]", "one response is not enough"),
        ("rl.in_flight=2", "rl.in_flight = 2: must be at least 3"),
        ("rl.max_tokens=128", "rl.max_tokens = 128: a prompt and its response must fit"),
        ("rl.tasks=[]", "rl.tasks"),
        ("rl.length.k0=-1.0", "rl.length.k0"),
        ("init_from=null", "task=rl starts from a checkpoint"),
        ("lora.dropout=0.1", "lora.dropout = 0.1: with dropout the policy"),
        ("task.sample_tokens=3", "task.sample_tokens = 3: has no effect with task=rl"),
        ("parallel.expert_parallel=2", "must hold the whole model"),
        ("rl=null", "rl = null: task=rl needs this section"),
    ],
)
def test_what_does_not_fit_is_refused(make_rl, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rl(change)


def test_the_section_is_for_its_task_only(make_config) -> None:
    task = "{prompts: a:b, reward: a:b}"
    given = "{tasks: [" + task + "], efforts: [1], samples: [2], prompts: 1, max_tokens: 9, temperature: 1.0, "
    given += "length: {c_max: 1.0, k0: 1.0, l_norm: 1.0, spread: 1.0}, staleness: 1, ahead: 0.0, in_flight: 2, "
    given += "loss: {clip_low: 0.1, clip_high: 0.1, off_policy_threshold: null, kl: 0.0}, "
    given += "reward_workers: 1, reward_seconds: 1.0, "
    given += "eval_prompts: 1, eval_efforts: [1], drafter: false, drafter_lr_factor: 1.0}"
    with pytest.raises(ConfigError, match="rl = .*: has no effect with task=pretrain"):
        make_config(f"rl={given}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "word " * 200}, "rl.tasks: a prompt of .* tokens.*Raise task.seq_len or remove the prompt: .*word"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "must end with"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role"),
        ({"prompt": " "}, "empty message"),
    ],
)
@pytest.mark.parametrize("key", ["prompts", "held_out"])
def test_prompts_that_cannot_be_asked_are_named_at_the_start(
    make_policy, prompts: Path, tmp_path: Path, key: str, record: dict, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(record) + "\n")
    files = {"prompts": prompts / "prompts.jsonl", "held_out": prompts / "prompts.jsonl", key: path}
    task = "{{prompts: '{prompts}', held_out: '{held_out}', reward: '{grade}:grade'}}"
    task = task.format(**files, grade=prompts / "grade.py")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:2: .*{message}"):
        make_policy(f"rl.tasks=[{task}]")


def test_the_state_of_a_collector_is_independent_of_the_one_it_was_taken_from(make_policy) -> None:
    """Two collectors over one model, the second continuing a copy of the first's state, go the same way."""
    policy = make_policy(*AHEAD[:2])
    first: Collector = policy.collector
    first.collect()
    buffer = json.dumps({"next": first.next})
    torch.save(first.state_dict(), policy.run.config.run_dir.parent / "state.pt")
    state = torch.load(policy.run.config.run_dir.parent / "state.pt", weights_only=True)
    assert json.loads(buffer)["next"] == state["next"]
    second = rl.make_policy(policy.run, first.rewards, None).collector
    second.load_state_dict(state)
    ours, theirs = first.collect(), second.collect()
    assert [(g.number, [r.sample.tokens for r in g.responses]) for g in ours] == [
        (g.number, [r.sample.tokens for r in g.responses]) for g in theirs
    ]


@pytest.mark.parametrize("small", [True, False], ids=["small file", "as it used to be"])
def test_another_number_of_processes_goes_on_behind_all_that_had_begun(make_policy, small: bool) -> None:
    policy = make_policy()
    folder = policy.run.config.run_dir / "rollout"
    folder.mkdir(parents=True)
    counts = (5, 4)  # of two efforts: prompts 0, 2, 4 there, 1, 3 here
    if small:
        rl.begun_file(folder, 3).write_text(json.dumps({"begun": counts}))
    else:
        for rank, begun in enumerate(counts):
            torch.save({"ranks": 2, "next": begun}, rl.rollout_file(folder, 3, rank))
    policy.collector.load_state_dict(rl.read_rollout(policy, TrainerState(step=3)))
    numbers = [group.number for group in policy.collector.collect()]
    assert min(numbers) // 2 in (5, 6) and len(numbers) == 4
    assert "the unfinished responses of the previous 2 processes are dropped" in policy.run.notes[-1]


def test_state_counts_tokens_of_all_responses(make_policy) -> None:
    policy, state = make_policy(), TrainerState()
    groups = policy.collector.collect()
    record = rl.step(policy, groups, state)
    samples = [response.sample for group in groups for response in group.responses]
    assert state.step == 1
    assert state.tokens == record["tokens"] == sum(len(s.request.prompt) + len(s.tokens) for s in samples)


def test_the_reference_of_an_adapter_is_the_model_without_it(make_rl) -> None:
    """Adapter and router biases move; the reference gives the numbers of a copy of the start, and leaves them as they
    are.
    """
    changes = ["lora=all", "optim=adamw", "lora.rank=4", "rl.loss.kl=0.1"]
    run = build(make_rl(*changes))
    begin(run)
    copied, reference = Copy(copy.deepcopy(run.model)), rl.make_reference(run)
    assert not isinstance(reference, Copy)
    ids = torch.randint(5, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    shape = Shape(24, 2, 0, run.model_config.text.num_hidden_layers, run.model_config.text.num_experts_per_tok, 0)
    batch = {**empty_batch(shape), "input_ids": ids, "labels": ids.clone()}
    batch["seq_lens"], batch["prompt_lens"] = torch.tensor([[24], [20]]), torch.tensor([[4], [4]])
    batch["routing"] = torch.full((2, 24, *batch["routing"].shape[2:]), -1, dtype=torch.int16)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
        for pair in run.model.router_biases():
            for bias in pair:
                bias += torch.arange(len(bias))
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.train()
    found = []
    for one in (copied, reference):
        with one.model() as model:
            found.append(log_probs_under(model, batch, 1.0))
    assert torch.equal(*found) and found[0].any()
    assert not torch.equal(found[0], log_probs_under(run.model, batch, 1.0))
    assert run.model.training and all(torch.equal(before[name], t) for name, t in run.model.state_dict().items())


@pytest.mark.slow
def test_an_adapter_is_trained_on_what_it_writes(make_rl, checkpoint_folder: Path) -> None:
    changes = ["lora=all", "optim=adamw", "lora.rank=4", "optim.schedule.peak=1.0e-2"]
    config = make_rl(*changes, "task.tokens=2500", "checkpoint.export=plain")
    rl.run(config)
    steps = [record for record in records(config) if record["kind"] == "train"]
    assert all(step["ratio"] == pytest.approx(1, abs=1e-3) for step in steps), "rollout and training agree"
    given = load_pretrained(checkpoint_folder).state_dict()
    merged = load_pretrained(config.run_dir / "export").state_dict()
    changed = {name for name, tensor in given.items() if not torch.equal(merged[name], tensor)}
    assert changed and all(".attn." in name or "experts" in name for name in changed)
