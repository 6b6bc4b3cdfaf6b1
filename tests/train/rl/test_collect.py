"""Which prompt starts when, over a rollout that finishes responses at set times; how responses are read; prompts."""

from __future__ import annotations

import itertools
import json
import random
import re
from concurrent.futures import Future

import pytest
from tokenizers import Tokenizer

from data import DataError, load_tokenizer
from model.generation import Request, Sample
from train.errors import InputError
from train.rl.collect import Collector, SamplingPlan
from train.rl.prompts import Prompts, messages_of
from train.rl.rewards.pool import Outcome

PLAN = SamplingPlan(
    (20, 80), (2, 3), groups=2, max_tokens=8, max_length=99, temperature=1.0, in_flight=7, ahead=1.0, seed=5
)


@pytest.fixture(scope="session")
def tokenizer(compose_raw, overrides) -> Tokenizer:
    from train.config.parse import parse

    return load_tokenizer(parse(compose_raw(*overrides)).data)


class Timed:
    """Finishes request number n after ``duration(n)`` polls, with one token of reasoning for each."""

    def __init__(self, tokenizer: Tokenizer, duration):
        self.ids = [tokenizer.token_to_id(token) for token in ("</think>", "<｜end▁of▁sentence｜>")]
        self.duration, self.running, self.requests, self.most = duration, {}, [], 0

    @property
    def in_flight(self) -> int:
        return len(self.running)

    def submit(self, request: Request) -> int:
        number = len(self.requests)
        self.requests.append(request)
        self.running[number] = self.duration(number)
        self.most = max(self.most, len(self.running))
        return number

    def poll(self) -> list[Sample]:
        self.running = {number: left - 1 for number, left in self.running.items()}
        done = [number for number, left in self.running.items() if left <= 0]
        for number in done:
            del self.running[number]
        return [self.sample(number) for number in done]

    def sample(self, number: int) -> Sample:
        tokens = [50] * self.duration(number) + [self.ids[0], 60, self.ids[1]]
        request, count = self.requests[number], len(tokens)
        return Sample(request, number, tokens, [0.0] * count, None, [0] * count, finish="stop")


class Graded:
    """Rewards that are there at once: 1."""

    def __init__(self):
        self.calls = []

    def submit(self, *call) -> Future:
        self.calls.append(call)
        future = Future()
        future.set_result(Outcome(1.0))
        return future


def count(draw) -> dict:
    return {"prompt": str(draw.randrange(10**6))}


@pytest.fixture
def make(tokenizer: Tokenizer):
    def make(plan: SamplingPlan, duration) -> Collector:
        prompts = Prompts([f"{__file__}:count"], plan.seed)
        return Collector(plan, prompts, Timed(tokenizer, duration), Graded(), tokenizer)

    return make


def replace(plan: SamplingPlan, **changes) -> SamplingPlan:
    return SamplingPlan(**{**vars(plan), **changes})


def test_the_next_subgroup_starts_when_enough_responses_of_any_are_done(make) -> None:
    """In flight 7: groups of 2, 3 and 2 fill it. Each time that so many responses are done that the next one fits,
    it starts, although no group need be complete.
    """
    collector = make(replace(PLAN, ahead=9.0), lambda n: {0: 1, 2: 1, 5: 1}.get(n, 5))
    started = []
    inner = collector.rollout.submit
    collector.rollout.submit = lambda request: (started.append(collector.next), inner(request))[1]
    collector._dispatch()
    assert started == [0, 0, 1, 1, 1, 2, 2], "2 + 3 + 2"
    for sample in collector.rollout.poll():
        collector._receive(sample)
    assert len(collector.open) == 3 and not collector.ready, "one response of each is done, no group complete"
    collector._dispatch()
    assert started[7:] == [3, 3, 3]
    assert collector.rollout.in_flight == 7


@pytest.mark.parametrize("ahead", [0.0, 0.5, 3.0])
def test_bounds_are_kept_and_every_subgroup_is_handed_over_once(make, ahead: float) -> None:
    cycle = itertools.cycle([3, 1, 4, 1, 5, 9, 2, 6])
    durations: dict[int, int] = {}
    collector = make(replace(PLAN, ahead=ahead), lambda n: durations.setdefault(n, next(cycle)))
    bound, seen = int(5 * (1 + ahead)), []
    inner = collector.rollout.poll

    def poll():
        assert collector.outstanding <= bound and collector.rollout.in_flight <= 7
        return inner()

    collector.rollout.poll = poll
    for _ in range(12):
        groups = collector.collect()
        assert len(groups) == 2
        for group in groups:
            assert [r.sample.request for r in group.responses] == collector.requests(group)
            assert group.effort == (20, 80)[group.number % 2] and len(group.responses) == (2, 3)[group.number % 2]
        seen += [group.number for group in groups]
    assert len(set(seen)) == len(seen) and max(seen) <= 24 + bound
    assert bool(collector.open or collector.ready) == bool(ahead), "begun for a later step"


def test_subgroups_of_very_unequal_sizes_never_block_a_step(make) -> None:
    """Small groups overtake the large ones, whose responses alone then come near the bound."""
    collector = make(replace(PLAN, sizes=(2, 8), in_flight=99, ahead=0.5), lambda n: 9 if n % 10 > 1 else 1)
    idle = iter(range(500))
    seen = [group.number for _ in range(12) for group in collector.collect(lambda: next(idle, None) is None) or []]
    assert len(seen) == len(set(seen)) == 24


def test_processes_share_the_prompts_and_write_what_one_would(make) -> None:
    def asked(plan: SamplingPlan, steps: int) -> dict:
        collector = make(plan, lambda n: 1)
        groups = [group for _ in range(steps) for group in collector.collect()]
        return {(g.number, m): r.sample.request for g in groups for m, r in enumerate(g.responses)}

    whole = asked(replace(PLAN, groups=4, in_flight=20), 3)
    halves = [asked(replace(PLAN, groups=2, in_flight=20, ahead=0.0, rank=r, ranks=2), 3) for r in range(2)]
    assert not halves[0].keys() & halves[1].keys()
    assert halves[0] | halves[1] == whole
    assert len({request.seed for request in whole.values()}) == len(whole), "every response has its own draws"


def test_what_was_put_back_comes_first_and_is_not_graded_again(make) -> None:
    collector = make(PLAN, lambda n: 1)
    groups = collector.collect()
    calls = len(collector.rewards.calls)
    collector.put_back(groups)
    again = collector.collect()
    assert [g.number for g in again] == [g.number for g in groups] and len(collector.rewards.calls) == calls


def test_stopping_keeps_what_has_begun(make) -> None:
    collector = make(PLAN, lambda n: 3)
    stops = iter([False, False, True])
    assert collector.collect(lambda: next(stops)) is None
    assert collector.rollout.in_flight > 0
    assert [group.number for group in collector.collect()] == [0, 1]


def test_stopping_does_not_wait_for_rewards(make) -> None:
    collector, future = make(PLAN, lambda n: 1), Future()
    collector.rewards.submit = lambda *call: future
    assert collector.collect(lambda: collector.rollout.in_flight == 0 and len(collector.ready) >= 2) is None
    future.set_result(Outcome(0.5))
    groups = collector.collect()
    assert [group.number for group in groups] == [0, 1]
    assert {r.outcome.reward for group in groups for r in group.responses} == {0.5}


def response(tokenizer: Tokenizer, text: list, finish: str) -> Sample:
    """Control tokens by name in tuples, all else as text."""
    tokens: list[int] = []
    for part in text:
        tokens += [tokenizer.token_to_id(part[0])] if isinstance(part, tuple) else tokenizer.encode(part).ids
    return Sample(Request((1,), 99), 0, tokens, [], None, [], finish=finish)


def test_reading_a_response(make, tokenizer: Tokenizer) -> None:
    read, end, eos = make(PLAN, lambda n: 1).read, ("</think>",), ("<｜end▁of▁sentence｜>",)
    thought = len(tokenizer.encode("let me see").ids)
    assert read(response(tokenizer, ["let me see", end, "42", eos], "stop")) == (thought, ("42", "let me see"))
    assert read(response(tokenizer, [end, eos], "stop")) == (0, ("", ""))
    assert read(response(tokenizer, ["let me see", eos], "stop")) == (thought, None), "no answer"
    assert read(response(tokenizer, ["let me see"], "length")) == (thought, None)
    assert read(response(tokenizer, ["let me see", end, "4"], "length")) == (thought, None), "an answer cut off"
    spelled = response(tokenizer, ["a </think> b", end, "4", eos], "stop")
    assert read(spelled)[1] == ("4", "a </think> b"), "spelled out, it is text"


def test_a_prompt_longer_than_its_row_is_named(make) -> None:
    with pytest.raises(InputError, match=r"a prompt of \d+ tokens and its response of up to rl.max_tokens = 8"):
        make(replace(PLAN, max_length=20), lambda n: 1).collect()


def test_records_of_a_file_come_once_an_epoch_in_an_order_of_the_seed(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(9)) + "\n")
    order = [Prompts([str(path)], 3).at(n)[1]["prompt"] for n in range(18)]
    assert sorted(order[:9]) == sorted(order[9:]) == [str(n) for n in range(9)] and order[:9] != order[9:]
    prompts = Prompts([str(path)], 3)
    assert [prompts.at(n)[1]["prompt"] for n in reversed(range(18))] == order[::-1], "a function of the number alone"
    assert [Prompts([str(path)], 4).at(n)[1]["prompt"] for n in range(18)] != order


def test_tasks_are_drawn_by_lot() -> None:
    drawn = [
        Prompts(["train.rl.rewards.builtin:letters", "train.rl.rewards.builtin:arithmetic"], 0).at(n) for n in range(40)
    ]
    assert 10 < sum(task for task, _ in drawn) < 30
    assert all(("level" in record) == bool(task) for task, record in drawn)
    assert messages_of({"prompt": "hi"}) == [{"role": "user", "content": "hi"}]
    assert messages_of({"messages": [1]}) == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "p.jsonl:2: invalid JSON"),
        ('{"prompt": "a"}\n\n{"question": "b"}\n', "p.jsonl:3: no prompt"),
        ("[1]\n", "p.jsonl:1: no prompt"),
        ("\n", "p.jsonl: no records"),
        (None, "p.jsonl: missing file"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "p.jsonl:2: invalid UTF-8: byte 0xff"),
        ('{"prompt": ' + "9" * 5000 + "}", "p.jsonl:1: invalid JSON"),
        ('{"prompt": "a", "messages": "b"}', "p.jsonl:1: no prompt"),
    ],
)
def test_a_malformed_file_of_prompts_is_named(tmp_path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "p.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        Prompts([str(path)], 0)


def test_lines_of_a_file_end_at_line_feeds_only(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b"}\r\n{"messages": null, "prompt": "c"}', encoding="utf-8")
    assert {messages_of(Prompts([str(path)], 0).at(n)[1])[0]["content"] for n in range(2)} == {"a\u2028b", "c"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'prompt': 'a', 'seen': {1}}", "did not return a JSON record: TypeError: seen = {1}: Object"),
        ("return {'prompt': 'a', 'x': float('nan')}", "did not return a JSON record: TypeError: x = nan"),
        ("return {'question': 'a'}", "returned {'question': 'a'}, without a prompt: a record needs"),
        ("return None", "returned None, without a prompt"),
        ("return 1 / 0", "did not return a JSON record: ZeroDivisionError"),
        ("raise SystemExit(3)", "did not return a JSON record: SystemExit: 3"),
        ("return {'prompt': str(next(COUNT))}", "returned {'prompt': '0'}, then {'prompt': '1'}, for two generators"),
        ("return {'prompt': 'refused'}", "returned {'prompt': 'refused'}: wrong: no"),
    ],
)
def test_a_function_that_draws_no_record_is_named(tmp_path, body: str, message: str) -> None:
    def check(record: dict) -> None:
        if record["prompt"] == "refused":
            raise DataError("", 0, "wrong", "no")

    path = tmp_path / "mine.py"
    path.write_text(f"import itertools\nCOUNT = itertools.count()\ndef draw(draw):\n    {body}\n")
    with pytest.raises(InputError, match=re.escape(f"rl.tasks: prompts '{path}:draw' {message}")):
        Prompts([f"{path}:draw"], 0, check)


def test_a_drawn_record_is_what_a_file_would_hold(tmp_path) -> None:
    """So that rewards, which get it as JSON, and a resumed run, which reads it from a file, see the same."""
    path = tmp_path / "mine.py"
    path.write_text("def draw(draw):\n    return {'prompt': 'a', 'pair': (1, 2), 3: None}\n")
    assert Prompts([f"{path}:draw"], 0).at(5) == (0, {"prompt": "a", "pair": [1, 2], "3": None})


def test_a_function_is_checked_at_every_draw(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def draw(draw):\n    return {'prompt': 'a'} if draw.random() < 0.5 else [draw.random()]\n")
    seeds = [seed for seed in range(20) if random.Random(f"{seed}/0/record").random() < 0.5]
    prompts = Prompts([f"{path}:draw"], seeds[0])
    with pytest.raises(InputError, match=r"returned \[0.*without a prompt"):
        for number in range(50):
            prompts.at(number)


def test_a_source_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(
        InputError, match="rl.tasks: prompts 'train.rl.rewards.builtin:nothing' cannot be used: AttributeError"
    ):
        Prompts(["train.rl.rewards.builtin:nothing"], 0)
