"""What 768 processes agree on, as the shipped cluster layout has them: groups, owners, the plan, and who is lost. In a
made-up world: groups of torch's fake backend, and a store whose other 767 users are the test.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from data import DataError
from model import ModelConfig, build_model
from model.parallel.ranks import Parallel, RankGroup
from optim.optimizer import STATE_KEYS
from optim.ownership import assign_owners
from tests.python_server import Program
from train.build import build_optimizer
from train.config.parse import parse
from train.config.schema import Config
from train.distributed import failure_detector
from train.distributed.failure_detector import FailureDetector
from train.distributed.launchers import ProcessInfo
from train.distributed.world import World
from train.tasks.plan import plan

SIZE, EXPERTS, TABLES = 768, 384, 768
PER_NODE = 8
SOME = (0, 1, 383, 384, 767)


@pytest.fixture(scope="module")
def cluster(compose_raw) -> Config:
    config = parse(compose_raw("task=plan", "model=v41_flash", "parallel=cluster"))
    layout = config.parallel
    assert (layout.world_size, layout.expert_parallel, layout.table_shards) == (SIZE, EXPERTS, TABLES)
    return config


def groups(rank: int) -> None:
    """Print what rank ``rank`` is told of its groups. Run in a process of its own."""
    from datetime import timedelta

    from torch.testing._internal.distributed.fake_pg import FakeStore

    from train.distributed.engine import init_distributed, make_groups

    dist.init_process_group("fake", rank=rank, world_size=SIZE, store=FakeStore())
    init_distributed("fake", "cpu", timedelta(minutes=1))
    found = {}
    for parts in (EXPERTS, TABLES):
        pair = make_groups(parts, ProcessInfo(rank, SIZE, rank % PER_NODE))
        found[parts] = [(one.rank, one.size, dist.get_process_group_ranks(one.group)) for one in pair]
    print("found", json.dumps(found))


def test_groups(tmp_path: Path) -> None:
    """The parts of a parameter lie on neighbours, the copies of a part as far apart as there are parts."""
    code = "import sys; from tests.train.distributed.test_768_ranks import groups; groups(int(sys.argv[1]))"
    started = {rank: Program(["-c", code, str(rank)], tmp_path / f"{rank}.log") for rank in SOME}
    for rank, program in started.items():
        assert program.wait() == 0, program.output
        found = json.loads(program.output.rsplit("found ", 1)[1])
        first = rank // EXPERTS * EXPERTS
        assert found[str(EXPERTS)] == [
            [rank - first, EXPERTS, list(range(first, first + EXPERTS))],
            [rank // EXPERTS, SIZE // EXPERTS, [rank % EXPERTS, rank % EXPERTS + EXPERTS]],
        ]
        assert found[str(TABLES)] == [[rank, SIZE, list(range(SIZE))], [0, 1, [rank]]]


def world(rank: int) -> World:
    """What a rank of the cluster knows of the others, without connections to them."""
    experts, tables = RankGroup(None, rank % EXPERTS, EXPERTS), RankGroup(None, rank, TABLES)
    replicas = {1: RankGroup(None, rank, SIZE), EXPERTS: RankGroup(None, rank // EXPERTS, SIZE // EXPERTS)}
    return World(torch.device("meta"), rank, SIZE, Parallel(experts, tables, True), {**replicas, TABLES: RankGroup()})


def test_every_state_has_one_owner_and_the_fullest_is_the_plans(cluster: Config) -> None:
    """Each rank's optimizer decides by itself, on the released model. All have the same parameters in the same order,
    so what all own follows from the rule; some are asked.
    """
    shape = ModelConfig.from_dict(cluster.model)
    model = build_model(shape, runtime=cluster.runtime, parallel=world(0).parallel, device="meta")
    asked = {rank: build_optimizer(cluster, shape, model, world(rank)) for rank in SOME}
    sizes: dict[int, list[int]] = defaultdict(list)  # bytes of state, by the number of parts that a parameter is in
    for group in asked[0].param_groups:
        for parameter in group["params"]:
            parts = parameter.shard.ranks.size if hasattr(parameter, "shard") else 1
            sizes[parts].append(4 * len(STATE_KEYS[group["method"]]) * parameter.numel())
    held = [0] * SIZE
    for parts, group in sizes.items():
        for size, owner in zip(group, assign_owners(group, SIZE // parts), strict=True):
            for rank in range(owner * parts, (owner + 1) * parts):
                held[rank] += size
    whole = sum(parts * sum(group) for parts, group in sizes.items())
    assert sum(held) == whole
    assert {rank: optimizer.state_bytes() for rank, optimizer in asked.items()} == {r: held[r] for r in SOME}
    assert max(held) == sum(plan(cluster).state.values())
    largest = max(sizes[1])
    assert max(held) < 1.35 * whole / SIZE or max(held) < largest + whole / SIZE, (max(held), largest, whole / SIZE)


class Store:
    """A store with the other processes in it; counts what is asked of it."""

    def __init__(self, size: int) -> None:
        self.inner, self.calls = dist.HashStore(), Counter[str]()
        for rank in range(size):
            self.inner.set(f"process/{rank}", f"node{rank // PER_NODE} {10_000 + rank}")
            self.inner.set(f"heartbeat/{rank}", json.dumps([0, 0, None, "start"]))

    def beat(self, ranks: range, count: int, silent: int | None = None, late: int | None = None) -> None:
        """All but ``silent`` are alive; all but ``late``, if it is given, wait in a collective call."""
        for rank in ranks:
            if rank == late or late is None:
                beat = [count, 0, None, "look_up in model/engram.py:7, layer 1"]
            else:
                beat = [count, float(count), "all_to_all_single", "exchange in model/moe.py:9, layer 14"]
            if rank != silent:
                self.inner.set(f"heartbeat/{rank}", json.dumps(beat))

    def __getattr__(self, name: str):
        def call(*arguments):
            self.calls[name] += 1
            return getattr(self.inner, name)(*arguments)

        return call


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "HEARTBEAT_INTERVAL", 1.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def check(detector: FailureDetector, store: Store, beats: int, silent: int | None = None) -> str | None:
    """What it finds within so many heartbeats of all others but one."""
    for count in range(1, beats + 1):
        store.beat(range(SIZE), count, silent)
        if found := detector._check():
            return found
    return None


def test_a_silent_rank_among_768_is_named(no_waiting) -> None:
    store = Store(SIZE)
    detector = FailureDetector(store, 0, SIZE, timeout=3.0)
    assert check(detector, store, 20) is None
    assert check(detector, store, 3, silent=613) is None
    assert check(detector, store, 2, silent=613) == "rank 613 (process 10613 on node76) is gone"
    other = FailureDetector(store, 42, SIZE, timeout=3.0)
    assert other._check() == "rank 613 (process 10613 on node76) is gone", "rank 0 has told all"


def test_a_rank_among_768_that_lives_but_does_not_arrive_is_named(no_waiting) -> None:
    store = Store(SIZE)
    detector = FailureDetector(store, 0, SIZE, timeout=100.0, hang_timeout=30.0, stacks=Path("runs/x/stacks"))
    for count in range(1, 31):
        store.beat(range(SIZE), count, late=613)
        detector._last_sent = store.inner.get("heartbeat/0").decode()
        assert count == 30 or detector._check() is None
    assert detector._check() == (
        "rank 613 (process 10613 on node76) has not arrived in all_to_all_single (exchange in model/moe.py:9, "
        "layer 14), where rank 0 has waited for it for 30 s; it is at look_up in model/engram.py:7, layer 1. The stack "
        "traces of all ranks are in runs/x/stacks"
    )
    assert FailureDetector(store, 42, SIZE, timeout=100.0)._check().startswith("rank 613 "), "rank 0 has told all"


@pytest.mark.parametrize(("rank", "calls"), [(0, 2), (1, 2), (9, 1)])
def test_a_rank_calls_the_store_as_often_in_any_world(no_waiting, rank: int, calls: int) -> None:
    for size in (16, SIZE):
        store = Store(size)
        detector = FailureDetector(store, rank, size, timeout=3.0)
        assert store.calls == {"set": 2, "multi_get": 1}
        store.calls.clear()
        assert detector._check() is None
        assert store.calls.total() == calls


def test_ranks_of_768_that_did_not_start_are_named_in_spans() -> None:
    store = dist.HashStore()
    for rank in set(range(SIZE)) - {7, *range(64, 72), 767}:
        store.set(str(rank), "")
    assert failure_detector._absent(store, SIZE) == "ranks 7, 64-71, 767 of 768"


def test_what_one_rank_computes_or_refuses_is_told_to_all() -> None:
    sent: list = []

    class Rank(World):
        def from_first(self, value):
            sent.append(pickle.dumps(value)) if self.first else None
            return pickle.loads(sent[-1])

        def _wait_for_first(self):
            pass

    def refuse():
        raise DataError("a.jsonl", 3, "blank line", "remove it")

    ranks = [Rank(torch.device("cpu"), rank, 2) for rank in range(2)]
    assert [rank.once(lambda rank=rank: f"made by {rank.rank}") for rank in ranks] == ["made by 0"] * 2
    for rank in ranks:
        with pytest.raises(DataError, match="a.jsonl:3: blank line: remove it") as caught:
            rank.once(refuse)
        assert caught.value.reason == "blank line"
