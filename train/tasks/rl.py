"""``task=rl`` and ``task=distill``: reinforcement learning and on-policy distillation.

Each step collects graded responses, takes an optimizer step (policy gradient, or distillation from the teachers), and
hands the new weights to the rollout, which generates further responses with them.

Read ``train`` first, then in ``train/rl``: ``collect.py``, ``batch.py``, ``policy_gradient.py`` and ``distill.py``. A
step is ``train.loop.train_step`` with another objective. Checkpoints, resuming and stopping work as in every run; the
state of the rollout is stored in separate files.
"""

from __future__ import annotations

import copy
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import special_ids
from data.tokenizer_files import tokenizer_files
from model import DeepseekV41, Drafter, save_pretrained
from train.build import Run, build
from train.checkpoint import storage
from train.checkpoint.background import Background
from train.checkpoint.run_state import CheckpointError, TrainerState, write_text
from train.config.schema import Config
from train.errors import InputError, user_errors
from train.logging.log import Reporter
from train.loop import repeat, train_step
from train.rl.batch import Scored, Shape, empty_batch, score
from train.rl.collect import Collector, Group, SamplingPlan, encoded
from train.rl.distill import Teachers
from train.rl.drafting import PolicyDrafter, accepted
from train.rl.log import RlReporter, table
from train.rl.policy_gradient import PolicyGradient
from train.rl.prompts import Prompts
from train.rl.reference import BaseModel, Copy, Reference
from train.rl.rewards.pool import Rewards
from train.rl.rollout.base import LocalRollout, Rollout
from train.rl.rollout.http import HttpRollout, Limits
from train.rl.rollout.servers import Servers
from train.session import begin, report_end, run_logger, run_session

NAME = re.compile(r"step-(\d{8,})\.(rank-\d+\.pt|json)")


@dataclass
class Policy:
    """A run, and the objects that reinforcement learning or distillation adds to it."""

    run: Run
    collector: Collector  # collects the responses to training prompts
    held_out: Prompts
    method: PolicyGradient | Teachers  # selects responses and computes losses: task=rl, task=distill
    shape: Shape
    drafter: PolicyDrafter | None  # rl.drafter: trained along, and used for the responses


def run(config: Config) -> None:
    """Train the run in ``config.run_dir`` from the start or from its last checkpoint, and print the results.

    Raises:
        InputError, DataError, OSError: the configuration, a checkpoint, prompts or reward functions cannot be used.
        NonFiniteError, Interrupted: the run ended early, see ``train.loop.repeat``.
    """
    with run_session(config) as (world, folder, changes):
        with user_errors():
            objects = build(config, world, draw=config.init_from is None)
            state = begin(objects)
            settings = objects.rl
            wanted = settings.loss is not None and settings.loss.kl
            reference = make_reference(objects) if wanted else None
            if folder:
                state = objects.resume(folder)
        tasks = [task.reward for task in settings.tasks]
        with closing(Rewards(tasks, settings.reward_workers, settings.reward_seconds)) as rewards:
            policy = make_policy(objects, rewards, reference)
            with closing(policy.collector.rollout):
                if folder:
                    policy.collector.load_state_dict(read_rollout(policy, state))
                    if policy.drafter is not None:
                        policy.drafter.resume(state)
                with run_logger(objects, state, folder, changes, RlReporter) as reporter:
                    train(policy, state, reporter)
                    _summarise(policy, state, reporter)


def make_reference(run: Run) -> Reference:
    """Return the initial policy as a reference. With LoRA, the reference is the model without its adapter; otherwise it
    is a copy of the model.
    """
    if run.config.lora.on:
        return BaseModel(run.model)
    return Copy(copy.deepcopy(run.model).requires_grad_(False))


def make_policy(run: Run, rewards: Rewards, reference: Reference | None) -> Policy:
    """Build the objects that the section ``rl`` describes. reference: the initial policy, or None if it is not used."""
    config, settings, text = run.config, run.rl, run.model_config.text
    plan = SamplingPlan(
        efforts=tuple(settings.trained),
        sizes=tuple(settings.samples),
        groups=settings.prompts // run.world.size * len(settings.efforts),
        max_tokens=settings.max_tokens,
        max_length=config.task.seq_len,
        temperature=settings.temperature,
        in_flight=settings.in_flight,
        ahead=settings.ahead,
        seed=config.seed,
        rank=run.world.rank,
        ranks=run.world.size,
    )

    def check(record: dict[str, Any]) -> None:
        encoded(record, max(plan.efforts), plan, run.tokenizer)

    prompts = Prompts([task.prompts for task in settings.tasks], config.seed, check)
    held_out = Prompts([task.held_out or task.prompts for task in settings.tasks], "held out", check)
    shape = Shape(
        seq_len=config.task.seq_len,
        rows=config.task.micro_batch,
        pad=special_ids(run.tokenizer).pad,
        layers=text.num_hidden_layers,
        experts_per_token=text.num_experts_per_tok,
        staleness=settings.staleness,
    )
    method = Teachers(run, shape) if config.task.kind == "distill" else PolicyGradient(run, shape, reference)
    drafter = PolicyDrafter(run, shape) if settings.drafter else None
    rollout = open_rollout(run, None if drafter is None else drafter.drafter)
    collector = Collector(plan, prompts, rollout, rewards, run.tokenizer)
    return Policy(run, collector, held_out, method, shape, drafter)


def open_rollout(run: Run, drafter: Drafter | None = None) -> Rollout:
    """Build the rollout that ``rl.rollout`` chooses: generation in this process, with a drafter if there is one, or on
    inference servers.
    """
    servers = run.rl.rollout
    if servers is None:
        return LocalRollout(run.model, run.rl.in_flight, run.autocast, drafter)

    def export(model: DeepseekV41, folder: Path) -> None:
        files = tokenizer_files(run.config.data, run.tokenizer)
        save_pretrained(model, folder, run.tokenizer, format=servers.format, companions=files, ranks=storage.ranks())

    text = run.model_config.text
    limits = Limits(text.vocab_size, text.num_hidden_layers, text.num_experts_per_tok)
    return HttpRollout(Servers(servers), run.world, run.config.run_dir / "policy", export, limits)


def train(policy: Policy, state: TrainerState, reporter: Reporter) -> None:
    """Collect responses and take steps until the end of the run (see ``train.loop.repeat``).

    A signal can also stop the run while it collects responses or evaluates.
    """
    run, collector = policy.run, policy.collector
    told: set[str] = set()
    failing = Failing(len(run.rl.tasks))

    def next_step(stopped: Callable[[], bool]) -> dict[str, Any] | None:
        started, before = time.perf_counter(), state.tokens
        groups = collector.collect(stopped)
        if run.world.any(groups is None) or groups is None:
            collector.put_back(groups or [])
            return None
        for note in failures(groups, told):
            reporter.log(note)
        if isinstance(policy.method, PolicyGradient):  # distillation does not use rewards
            failing.check(run.world.gather(outcomes(groups)))
        collected = time.perf_counter()
        record = step(policy, groups, state)
        seconds = time.perf_counter() - started
        state.seconds += seconds
        speed = (state.tokens - before) / seconds
        return record | {"collect_seconds": collected - started, "seconds": seconds, "tokens_per_second": speed}

    def publish() -> None:
        collector.rollout.update_weights(state.step, run.model)
        for note in collector.rollout.notes():
            reporter.log(note)

    repeat(run, state, reporter, next_step, partial(evaluate, policy), partial(save_all, policy), publish)


def step(policy: Policy, groups: list[Group], state: TrainerState) -> dict[str, Any]:
    """Take one optimizer step on the graded groups of all processes.

    Updates the counters in ``state`` and returns the step's record. If no group of any process contains different
    rewards, there is no gradient, and the weights are not updated.
    """
    run, settings, method = policy.run, policy.run.rl, policy.method
    scored = score(groups, settings.length, settings.trained)
    mine, counts = method.batches(scored, state.step)
    dummy_batches = max(run.world.gather(len(mine))) - len(mine)
    mine = [run.prepare(batch) for batch in [*mine, *[empty_batch(policy.shape)] * dummy_batches]]
    sums: dict[str, torch.Tensor] = {}
    numbers = None
    taught = sum(int((batch["labels"] >= 0).sum()) for batch in mine) * run.world.counts_rows
    if sum(run.world.gather(taught)):
        numbers = train_step(run, mine, state.step, state.tokens, method.losses_of(sums), dummy_batches)
    drafted = None if policy.drafter is None else policy.drafter.step(scored, state)
    counts |= accepted(scored)
    counts |= {"tokens": sum(_tokens(response.sample) for response in scored.responses), "taught": taught}
    counts |= {"groups": scored.groups, "version_lag": _lag(scored, state.step)}
    met = torch.stack(list(sums.values())).tolist() if sums else []  # one transfer from the device
    total = _summed(run, {**dict.fromkeys(method.NAMES, 0.0), **dict(zip(sums, met, strict=True)), **counts})
    state.step, state.tokens = state.step + 1, state.tokens + int(total["tokens"])
    record = {"step": state.step, "tokens": state.tokens, **measures(run, scored), **_per_token(total, method.NAMES)}
    if numbers is not None:
        record |= {
            "loss": float(numbers["lm_sum"]) / max(int(numbers["supervised"]), 1),
            "grad_norm": float(numbers["grad_norm"]),
            "lr": numbers["lr"],
        }
    if policy.drafter is not None:
        record["drafter"] = {"accepted": total["drafts_accepted"] / max(total["draft_passes"], 1), **(drafted or {})}
    return record


FAILING_STEPS = 3  # a reward function that has worked before ends the run if all its calls fail in this many steps


class Failing:
    """Ends a run whose reward function fails in every call, since the run would train on the length penalty alone."""

    def __init__(self, tasks: int):
        self.worked = [False] * tasks
        self.in_a_row = [0] * tasks

    def check(self, of_processes: list[list[tuple[int, str, str]]]) -> None:
        """Record the outcomes of a step in all processes (see ``outcomes``).

        Raises:
            InputError: all calls of a reward function have failed since the process started, or in the last
                ``FAILING_STEPS`` steps. All processes raise this error together.
        """
        calls = [outcome for outcomes in of_processes for outcome in outcomes]
        for task in range(len(self.worked)):
            mine = [(failure, detail) for number, failure, detail in calls if number == task]
            if not mine:
                continue
            if not all(failure for failure, _ in mine):
                self.worked[task], self.in_a_row[task] = True, 0
                continue
            self.in_a_row[task] += 1
            if not self.worked[task] or self.in_a_row[task] >= FAILING_STEPS:
                steps = "step" if self.in_a_row[task] == 1 else f"{self.in_a_row[task]} steps in a row"
                raise InputError(
                    f"rl.tasks[{task}].reward failed in every call of the last {steps} ({len(mine)} in the last one), "
                    f"so nothing can be learnt from it: {mine[-1][1]}. The last checkpoint is unchanged; correct the "
                    "function and run the same command again"
                )


def outcomes(groups: list[Group]) -> list[tuple[int, str, str]]:
    """Return a tuple (task number, kind of failure or "", reason of the failure) for every response that a reward
    function was called with.
    """
    return [
        (group.task, response.outcome.failure or "", response.outcome.detail)
        for group in groups
        for response in group.responses
        if response.outcome.called
    ]


def failures(groups: list[Group], told: set[str]) -> list[str]:
    """Return log lines that say why reward functions failed for this process's responses.

    told: kinds of failures that have been logged already; new kinds are added to this set.
    """
    notes = []
    for group in groups:
        for outcome in (response.outcome for response in group.responses):
            kind = outcome.detail.partition(":")[0]
            if outcome.failure and kind not in told:
                told.add(kind)
                notes.append(f"rl.tasks[{group.task}].reward failed, which counts as a reward of 0: {outcome.detail}")
    return notes


def evaluate(policy: Policy, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """Evaluate the policy on held-out prompts, under every effort of ``rl.eval_efforts``.

    Returns the record of the evaluation with reward, accuracy and reasoning length, or None as soon as ``stop`` returns
    True in any process. Responses are sampled as in training. Nothing in ``policy`` changes.
    """
    run, settings, trained = policy.run, policy.run.rl, policy.collector
    started, efforts, world = time.perf_counter(), tuple(settings.evaluated), run.world
    share = len(range(world.rank, settings.eval_prompts, world.size))
    groups: list[Group] | None = []
    if share:
        sizes, count = (1,) * len(efforts), share * len(efforts)
        plan = replace(trained.plan, efforts=efforts, sizes=sizes, groups=count, ahead=0.0, seed=0)
        rollout = trained.rollout.apart()
        groups = Collector(plan, policy.held_out, rollout, trained.rewards, run.tokenizer).collect(stop)
        rollout.close()
    if world.any(groups is None) or groups is None:
        return None
    return {**measures(run, score(groups, settings.length, settings.trained)), "seconds": time.perf_counter() - started}


def measures(run: Run, scored: Scored) -> dict[str, Any]:
    """Compute metrics of the responses of all processes: overall, for each effort, and counts of failed reward calls.

    ``accuracy`` is the share of responses with a task reward of 1 or more, ``length`` the mean number of reasoning
    tokens, ``task_reward`` the mean reward without the length penalty, and ``cut`` the share of responses that were cut
    off at ``rl.max_tokens``.
    """
    sums: Counter[Any] = Counter()
    values = zip(scored.responses, scored.efforts.tolist(), scored.rewards.tolist(), strict=True)
    for response, effort, reward in values:
        outcome, sample = response.outcome, response.sample
        sums.update({
            (effort, "count"): 1,
            (effort, "reward"): reward,
            (effort, "task_reward"): outcome.reward,
            (effort, "accuracy"): int(outcome.reward >= 1),
            (effort, "length"): response.length,
            (effort, "cut"): int(sample.finish == "length"),
        })  # fmt: skip
        if outcome.failure:
            sums[None, outcome.failure] += 1
    sums = _summed(run, sums)
    names = ("reward", "task_reward", "accuracy", "length", "cut")
    efforts = sorted({effort for effort, _ in sums if effort is not None})
    by_effort = {str(e): {name: sums[e, name] / sums[e, "count"] for name in names} for e in efforts}
    count = sum(sums[e, "count"] for e in efforts)
    overall = {name: sum(sums[e, name] for e in efforts) / max(count, 1) for name in names}
    failures = {name: int(n) for (effort, name), n in sums.items() if effort is None}
    return {**overall, "responses": int(count), "efforts": by_effort, "failures": failures}


def save_all(policy: Policy, state: TrainerState, background: Background | None = None) -> Path:
    """Write the unfinished responses of every process, then the run state. Returns the folder of the checkpoint."""
    run = policy.run
    folder = run.config.run_dir / "rollout"
    folder.mkdir(exist_ok=True)
    path = rollout_file(folder, state.step, run.world.rank)
    temporary = path.with_name(f".tmp-{path.name}")
    torch.save({"ranks": run.world.size, **policy.collector.state_dict()}, temporary)
    os.replace(temporary, path)
    begun = run.world.gather(policy.collector.next)
    if run.world.first:  # needed to resume with another number of processes
        write_text(begun_file(folder, state.step), json.dumps({"begun": begun}))
    run.world.barrier()
    if policy.drafter is not None:
        policy.drafter.save(state)
    saved = run.save(state, background)
    if run.world.first:
        kept = {state.step} | {int(path.name[5:]) for path in saved.parent.glob("step-*")}
        for old in folder.iterdir():
            match = NAME.fullmatch(old.name)
            if match is None or int(match[1]) not in kept:
                old.unlink()
    return saved


def read_rollout(policy: Policy, state: TrainerState) -> dict[str, Any]:
    """Read the state of the collector that was saved with the run state ``state``.

    If the number of processes has changed, unfinished responses are dropped, and prompts continue after the last prompt
    that any process had started.
    """
    run, collector = policy.run, policy.collector
    folder = run.config.run_dir / "rollout"

    def read(rank: int) -> dict[str, Any]:
        path = rollout_file(folder, state.step, rank)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # the file is missing, truncated, or not written by torch.save
            raise CheckpointError(
                f"{path} cannot be read: {type(error).__name__}. This file belongs to the checkpoint of step "
                f"{state.step}; delete the file and that checkpoint to continue from the previous checkpoint"
            ) from error

    known = begun_file(folder, state.step)
    if known.is_file():
        groups = json.loads(known.read_text(encoding="utf-8"))["begun"]
    else:  # the checkpoint was written by an older version, without this file
        groups = [read(rank)["next"] for rank in range(read(0)["ranks"])]
    before = len(groups)
    if before == run.world.size:
        return {**(read(run.world.rank)), "ranks": None}
    count = len(collector.plan.efforts)
    begun = max(-(-number // count) * before + rank for rank, number in enumerate(groups))
    run.notes.append(
        f"resumed with another number of processes: the unfinished responses of the previous {before} processes are "
        f"dropped, and prompts continue with number {begun}"
    )
    return {**collector.state_dict(), "next": -(-begun // run.world.size) * count}


def begun_file(folder: Path, step: int) -> Path:
    """Return the path of the file in a checkpoint folder that stores how many groups each process had started."""
    return folder / f"step-{step:08d}.json"


def rollout_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step:08d}.rank-{rank}.pt"


def _tokens(sample: Any) -> int:
    return len(sample.request.prompt) + len(sample.tokens)


def _lag(scored: Scored, version: int) -> int:
    """Sum up, over the tokens of all responses, by how many versions the policy that drew a token is older than
    ``version``.
    """
    return sum(version - drawn for response in scored.responses for drawn in response.sample.versions)


def _summed(run: Run, sums: Mapping[Any, float]) -> Counter[Any]:
    """Add up the dictionaries ``sums`` of all processes, key by key."""
    total: Counter[Any] = Counter()
    for other in run.world.gather(dict(sums)):
        total.update(other)
    return total


def _per_token(total: Counter[str], names: Iterable[str]) -> dict[str, Any]:
    """Convert the sums of a step to shares and means over the supervised tokens.

    names: the statistics that the objective sums over tokens.
    """
    taught = max(total["taught"], 1)
    return {
        **{name: int(total[name]) for name in ("groups", "zero_variance") if name in total},
        "stale": total["stale_tokens"] / max(total["taught"] + total["stale_tokens"], 1),
        "version_lag": total["version_lag"] / max(total["response_tokens"], 1),
        **{name: total[name] / taught for name in names},
    }


def _summarise(policy: Policy, state: TrainerState, reporter: Reporter) -> None:
    """Log the last lines of a run: results of every effort before and after training, and the files that it wrote."""
    reporter.stop_bar()
    assert state.first_valid is not None and state.last_valid is not None
    reporter.log(table(state.first_valid, state.last_valid))
    report_end(policy.run, state, reporter, drafter=None if policy.drafter is None else policy.drafter.drafter)
