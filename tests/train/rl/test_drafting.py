"""``rl.drafter``: a drafter is trained along with the policy, writes its responses with it, and does not change it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import load_drafter, load_pretrained
from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.rl.test_ranks import STOPPED, two_processes  # noqa: F401
from tests.train.rl.test_task import AHEAD, assert_same_run, interrupt, records
from train.checkpoint.run_state import TrainerState
from train.config.parse import parse
from train.config.problems import ConfigError
from train.errors import Interrupted
from train.rl.batch import batches, score
from train.rl.reference import log_probs_under
from train.tasks import dspark, rl

SHAPE = (
    "{num_nextn_predict_layers: 1, dspark_block_size: 3, dspark_noise_token_id: 511, dspark_markov_rank: 8, "
    "dspark_target_layer_ids: [2, 5], dspark_n_routed_experts: 4, dspark_num_experts_per_tok: 2}"
)


@pytest.fixture(scope="session")
def with_drafter(compose_raw, overrides, checkpoint_folder: Path, tmp_path_factory) -> Path:
    """The policy's checkpoint with a drafter that was trained for a few steps on its conversations."""
    output = tmp_path_factory.mktemp("drafter")
    left_out = ("model=", "task.sample", "data.source", "data.paths", "data.valid")
    kept = [text for text in overrides if not text.startswith(left_out)]
    changes = ["task=dspark", f"output={output}", f"init_from={checkpoint_folder}", f"dspark.drafter={SHAPE}"]
    changes += ["data=chat", f"data.paths=[{checkpoint_folder.parents[1]}/chats.jsonl]", "data.validation_share=0.1"]
    changes += ["task.seq_len=128", "task.tokens=4000", "dspark.tokens_per_anchor=1", "optim.schedule.peak=1.0e-2"]
    config = parse(compose_raw(*kept, *changes, "checkpoint.every=1000"))
    dspark.run(config)
    return config.run_dir / "export"


@pytest.fixture
def drafting(make_rl, with_drafter: Path):
    """``drafting("key=value", ...)``: the configuration of a run with a drafter."""
    return lambda *changes: make_rl("rl.drafter=true", f"init_from={with_drafter}", *changes)


@pytest.mark.slow
def test_a_run_trains_both_and_says_how_many_drafts_are_accepted(drafting, with_drafter: Path, capsys) -> None:
    config = drafting("checkpoint.export=plain", "rl.drafter_lr_factor=3.0")
    rl.run(config)
    steps = [record["drafter"] for record in records(config) if record["kind"] == "train"]
    assert len(steps) >= 2
    for step in steps:
        assert 0 < step["accepted"] < 3 and 1 < step["tau"] < 4 and len(step["alpha"]) == 3
        assert 0 <= step["ece"] < 1 and step["blocks"] >= 4 and step["expert_load"]["text"]["entropy"]
    assert "accepted=" in capsys.readouterr().out
    before, after = (
        {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
        for folder in (with_drafter, config.run_dir / "export")
    )
    assert before.keys() == after.keys()
    for name in ("mtp.0.main_proj.weight", "mtp.0.markov_head.head.weight", "layers.0.attn.wq_a.weight"):
        assert not torch.equal(before[name], after[name]), name
    load_drafter(config.run_dir / "export", load_pretrained(config.run_dir / "export"))


def test_nothing_of_the_drafter_reaches_the_policy(policy_of, drafting) -> None:
    policy = policy_of(drafting())
    groups = policy.collector.collect()
    scored = score(groups, policy.run.rl.length, policy.run.rl.trained)
    assert any(sum(response.sample.accepted) for response in scored.responses)
    before = {name: p.clone() for name, p in policy.run.model.state_dict().items()}
    own = {name: p.clone() for name, p in policy.drafter.drafter.state_dict().items()}
    record = policy.drafter.step(scored, TrainerState())
    assert record["tau"] > 1 and record["grad_norm"] > 0
    assert all(torch.equal(before[name], p) for name, p in policy.run.model.state_dict().items())
    assert all(p.grad is None for p in policy.run.model.parameters())
    now = policy.drafter.drafter.state_dict()
    assert {name for name, p in own.items() if not torch.equal(p, now[name])} > {
        "mtp.0.main_proj.weight",
        "mtp.0.attn.wkv.weight",
        "mtp.0.ffn.gate.bias",
        "mtp.0.confidence_head.proj.weight",
    }
    held = {id(p) for group in policy.run.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in policy.drafter.drafter.parameters()}


def test_responses_are_the_policys(policy_of, drafting, no_rounding) -> None:  # noqa: F811
    """Almost greedy ones are the same with and without a drafter; drawn ones have the log-probabilities that training
    computes.
    """
    cold = [policy_of(drafting(f"rl.drafter={on}", "rl.temperature=1.0e-4")) for on in ("true", "false")]
    found = [
        [[response.sample.tokens for response in group.responses] for group in policy.collector.collect()]
        for policy in cold
    ]
    assert found[0] == found[1]
    policy = policy_of(drafting())
    scored = score(policy.collector.collect(), policy.run.rl.length, policy.run.rl.trained)
    everything = torch.ones(len(scored.responses), dtype=torch.bool)
    for batch in batches(scored, everything, policy.shape, version=0)[0]:
        seen = log_probs_under(policy.run.model, batch, 1.0, routing_replay=True)
        mask = batch["labels"] >= 0
        assert (seen - batch["old_log_probs"])[mask].abs().max() < 1e-3


@pytest.mark.slow
def test_a_stopped_run_goes_on_exactly(drafting, monkeypatch) -> None:
    """Stopped while responses are written, killed between the checkpoints of drafter and policy."""
    ahead = ["rl.ahead=0.5", "task.tokens=2500"]
    whole = drafting("name=whole", *ahead)
    rl.run(whole)
    split = drafting("name=split", *ahead)
    with monkeypatch.context() as patch:
        interrupt(patch, version=1, polls=2)
        with pytest.raises(Interrupted):
            rl.run(split)

    class Killed(BaseException):
        pass

    saved, inner = list[Path](), rl.PolicyDrafter.save

    def save(self, state):
        path = inner(self, state)
        saved.append(path)
        if state.step == 3:
            raise Killed
        return path

    with monkeypatch.context() as patch:
        patch.setattr(rl.PolicyDrafter, "save", save)
        with pytest.raises(Killed):
            rl.run(split)
    assert saved[-1].is_dir()
    rl.run(split)
    assert_same_run(whole, split)
    ours, theirs = (load_drafter_state(config) for config in (whole, split))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def load_drafter_state(config) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint of a run's drafter."""
    newest = max((config.run_dir / "drafter").glob("step-*"))
    return {n: t for file in sorted(newest.glob("*.safetensors")) for n, t in load_file(file).items()}


def test_what_does_not_fit_is_refused(make_rl, drafting, checkpoint_folder: Path) -> None:
    with pytest.raises(ConfigError, match="rl.drafter: init_from describes no drafter.*task=dspark"):
        make_rl("rl.drafter=true")
    for changes, message in (
        (("parallel.world_size=2", "parallel.context_parallel=2"), "on rows that are split over processes"),
        (("lora.targets=[attention]", "optim=adamw"), "with whole weights only, not with an adapter"),
        (("rollout=sglang", "rl.rollout.urls=[http://localhost:1]"), "inference servers write the responses"),
    ):
        with pytest.raises(ConfigError, match=message):
            drafting(*changes)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_train_one_drafter_and_go_on_exactly(make_rl, two_processes, with_drafter: Path) -> None:  # noqa: F811
    """Drafts are accepted as with one process; rank 1 is stopped in the middle of responses."""
    own = ["rl.drafter=true", f"init_from={with_drafter}"]
    rl.run(make_rl("name=one", *own, "task.tokens=300"))
    two_processes("name=whole", *own, *AHEAD)
    two_processes("name=split", *own, *AHEAD, command=("-c", STOPPED), code=75)
    two_processes("name=split", *own, *AHEAD)
    one, whole, split = (records(make_rl(f"name={name}", *own)) for name in ("one", "whole", "split"))
    assert whole == split
    ours, theirs = ([record for record in some if record["kind"] == "train"][0] for some in (one, whole))
    # Which responses end up in the first step depends on what finishes first; about thirty blocks are counted in each.
    assert theirs["drafter"]["accepted"] == pytest.approx(ours["drafter"]["accepted"], abs=0.3)
    assert theirs["drafter"]["blocks"] >= 4
