"""Responses from servers: real ones on 127.0.0.1 that serve a tiny model, and fail in every way that servers do."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from model import DeepseekV41, load_pretrained, save_pretrained
from model.generation import Request, Sample, generate
from tests.distributed.ranks import Group
from tests.model.tiny import no_rounding, tiny_config, tiny_model  # noqa: F401
from tests.train.rl.toyserver import Fault, ToyServer
from train.config.problems import ConfigError
from train.config.rollout import Call, ServersConfig
from train.config.schema import Config, to_dict
from train.distributed.world import World
from train.errors import Interrupted
from train.rl.rollout.base import LocalRollout
from train.rl.rollout.http import HttpRollout, Limits
from train.rl.rollout.servers import ServerError, Servers
from train.tasks import rl

STOP = 5
UPDATE = Call("/update_weights_from_disk", {"model_path": "{folder}", "weight_version": "{version}"})
SETTINGS: dict[str, Any] = {
    "model": "toy",
    "key_variable": None,
    "format": "plain",
    "update": [UPDATE],
    "version": "/model_info",
    "routing": False,
    "connect_seconds": 60.0,
    "silence_seconds": 300.0,
    "update_seconds": 300.0,
    "retries": 2,
    "backoff_seconds": 0.01,
}
REQUESTS = [
    Request((1, 2, 3 + n), max_tokens=12, temperature=1.0 + n / 4, seed=n, stop=frozenset(range(STOP, 61, 7)))
    for n in range(6)
]


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return tiny_model(seed=0)


@pytest.fixture
def make_rollout(tmp_path: Path, no_rounding) -> Iterator[Callable[..., HttpRollout]]:  # noqa: F811
    """``make_rollout(server, ..., setting=value)``: nothing loaded yet."""
    made: list[HttpRollout] = []

    def make(*servers: ToyServer, **changes: Any) -> HttpRollout:
        config = ServersConfig(**{"urls": [server.url for server in servers], **SETTINGS, **changes})
        text = tiny_config().text
        limits = Limits(text.vocab_size, text.num_hidden_layers, text.num_experts_per_tok)
        world = World(torch.device("cpu"))
        made.append(HttpRollout(Servers(config), world, tmp_path / "policy", save_pretrained, limits))
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()


def finish(rollout: Any, seconds: float = 600) -> list[Sample]:
    """All samples in flight, in the order of their requests."""
    found, end = [], time.monotonic() + seconds
    while rollout.in_flight:
        assert time.monotonic() < end, "nothing comes any more"
        found += rollout.poll()
    return sorted(found, key=lambda sample: sample.id)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.01)


def run(rollout: Any, requests: list[Request] = REQUESTS) -> list[Sample]:
    for request in requests:
        rollout.submit(request)
    return finish(rollout)


def under(model: DeepseekV41, sample: Sample) -> torch.Tensor:
    """Log-probabilities of a sample's tokens by one forward pass."""
    ids = torch.tensor([[*sample.request.prompt, *sample.tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.request.prompt) - 1 : -1].double()
    log_p = (logits / sample.request.temperature).log_softmax(-1)
    return log_p.gather(1, torch.tensor(sample.tokens)[:, None]).squeeze(1)


def assert_drawn_from(model: DeepseekV41, sample: Sample, tokens: slice = slice(None)) -> None:
    difference = under(model, sample) - torch.tensor(sample.log_probs, dtype=torch.float64)
    assert difference[tokens].abs().max() < 1e-4


@pytest.fixture
def expected(model: DeepseekV41, no_rounding) -> list[Sample]:  # noqa: F811
    """What the model writes in this process."""
    rollout = LocalRollout(model, 64, nullcontext)
    rollout.update_weights(0, model)
    samples = run(rollout)
    assert {sample.finish for sample in samples} == {"stop", "length"}, "the requests should end in both ways"
    return samples


def assert_same(samples: list[Sample], expected: list[Sample], routing: bool = False) -> None:
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    for ours, theirs in zip(samples, expected, strict=True):
        assert ours.request == theirs.request and ours.finish == theirs.finish and ours.versions == theirs.versions
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        if routing:
            assert ours.routing.dtype == torch.int16 and torch.equal(ours.routing, theirs.routing)
        else:
            assert ours.routing is None


@pytest.mark.parametrize("routing", [True, False])
def test_servers_write_what_this_process_would_write(make_server, make_rollout, model, expected, routing) -> None:
    servers = [make_server(hold=0), make_server(hold=0)]
    rollout = make_rollout(*servers, routing=routing)
    rollout.update_weights(0, model)
    for request in REQUESTS:
        rollout.submit(request)
    until(lambda: sum(len(server.bodies) for server in servers) == len(REQUESTS))
    for server in servers:
        server.hold = math.inf
    assert_same(finish(rollout), expected, routing)
    asked = [len(server.bodies) for server in servers]
    assert asked == [3, 3], "both were asked, each for its share"
    assert all(body["model"] == "toy" for server in servers for body in server.bodies)
    assert rollout.poll() == [] and rollout.notes() == []


def test_nothing_is_sent_before_there_are_weights(make_server, make_rollout, model) -> None:
    server = make_server()
    rollout = make_rollout(server)
    rollout.submit(REQUESTS[0])
    assert rollout.poll() == [] and server.paths == [] and rollout.in_flight == 1
    rollout.update_weights(0, model)
    assert len(finish(rollout)) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_asked_again(make_server, make_rollout, model, expected, status) -> None:
    server = make_server()
    server.fault = lambda number, body: Fault(status, {"Retry-After": "0.2"}, "busy") if number < 2 else None
    rollout = make_rollout(server)
    rollout.update_weights(0, model)
    assert_same(run(rollout), expected)
    again = next(n for n in range(1, 8) if server.bodies[n] == server.bodies[0])
    assert server.times[again] - server.times[0] >= 0.2, "it waited as long as the server asked for"
    assert len(server.bodies) == 8 and rollout.notes() == []


def test_only_failures_in_a_row_count(make_server, make_rollout, model, expected) -> None:
    server = make_server()
    server.fault = lambda number, body: None if number % 2 else Fault(503)
    rollout = make_rollout(server, retries=1)
    rollout.update_weights(0, model)
    samples = [run(rollout, [request])[0] for request in REQUESTS]
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    assert len(server.bodies) == 12 and rollout.notes() == []


def test_requests_that_fail_together_are_one_failure(make_server, make_rollout, model) -> None:
    server = make_server(hold=0)
    server.fault = lambda number, body: Fault(cut=0) if number < 6 else None
    rollout = make_rollout(server, retries=1)
    rollout.update_weights(0, model)
    for n in range(6):
        rollout.submit(Request((1, 2, 3 + n), max_tokens=4, seed=n))
    until(lambda: len(server.bodies) == 6)
    server.hold = math.inf
    samples = finish(rollout)
    assert len(samples) == 6 and len(server.bodies) == 12 and rollout.notes() == []


def test_what_a_server_refuses_is_not_asked_again(make_server, make_rollout, model) -> None:
    server = make_server()
    server.fault = lambda number, body: Fault(400, text="max_tokens is too large")
    rollout = make_rollout(server)
    rollout.update_weights(0, model)
    with pytest.raises(
        ServerError, match=rf"{server.url} refuses the request: status 400 for /v1/completions: .*is too large"
    ):
        run(rollout, REQUESTS[:1])
    assert len(server.bodies) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault(cut=4), Fault(silent=4), Fault(change=lambda e: '{"error": {"code": 500}}')])
def test_a_response_that_breaks_off_goes_on_elsewhere(make_server, make_rollout, model, fault) -> None:
    """With the tokens it has, which are no longer drawn."""
    servers = [make_server(), make_server()]
    servers[0].fault = lambda number, body: fault if number == 0 else None
    rollout = make_rollout(*servers, silence_seconds=5.0 if fault.silent else 300.0, backoff_seconds=60.0)
    rollout.update_weights(0, model)
    request = Request((1, 2, 3), max_tokens=12, seed=5)
    (sample,) = run(rollout, [request])
    kept = 0 if fault.change else 4
    (first,), (second,) = servers[0].bodies, servers[1].bodies
    assert first["prompt"] == [1, 2, 3] and first["max_tokens"] == 12 and first["seed"] == 5
    assert second["prompt"] == [1, 2, 3, *sample.tokens[:kept]] and second["max_tokens"] == 12 - kept
    assert (second["seed"] == 5) == (kept == 0), "it goes on with other draws"
    assert sample.tokens[:kept] == generate(model, [request])[0].tokens[:kept]
    assert len(sample.tokens) == 12 and sample.finish == "length"
    assert_drawn_from(model, sample)


def test_a_response_is_complete_with_its_last_token(make_server, make_rollout, model, expected) -> None:
    """What breaks behind it is not missed, and is not asked for again."""
    server = make_server()

    stop = next(sample for sample in expected if sample.finish == "stop")
    server.fault = lambda number, body: Fault(change=lambda event: {**event, "choices": [_unfinished(event)]})
    rollout = make_rollout(server)
    rollout.update_weights(0, model)
    (sample,) = run(rollout, [stop.request])
    assert sample.tokens == stop.tokens and sample.finish == "stop" and len(server.bodies) == 1


def _unfinished(event: dict) -> dict:
    return {**event["choices"][0], "finish_reason": None}


def test_half_of_the_servers_die(make_server, make_rollout, model) -> None:
    servers = [make_server(hold=3), make_server(hold=3), make_server(), make_server()]
    rollout = make_rollout(*servers, retries=0)
    rollout.update_weights(0, model)
    requests = [Request((1, 2, 3), max_tokens=10, seed=n) for n in range(8)]
    for request in requests:
        rollout.submit(request)
    until(lambda: all(sample.tokens for sample in rollout.samples.values()))
    for server in servers[:2]:
        server.close()
    samples = finish(rollout)
    assert len(samples) == 8 and all(len(sample.tokens) == 10 for sample in samples)
    for sample in samples:
        assert_drawn_from(model, sample)
    notes = "\n".join(rollout.notes())
    assert all(f"server {server.url} is left out until it loads new weights" in notes for server in servers[:2])
    assert servers[2].url not in notes and servers[3].url not in notes
    back = make_server(port=servers[0].port)
    rollout.update_weights(1, model)
    run(rollout, requests[:4])
    assert back.bodies and back.version == "1"
    assert rollout.notes() == [f"server {back.url} is back"], "the other one's absence was told before"


def test_without_any_server_all_are_named(make_server, make_rollout, model) -> None:
    servers = [make_server(hold=0), make_server(hold=0)]
    rollout = make_rollout(*servers)
    rollout.update_weights(0, model)
    for request in REQUESTS:
        rollout.submit(request)
    for server in servers:
        server.close()
    with pytest.raises(ServerError, match="no server is left") as error:
        finish(rollout)
    assert all(f"- {server.url}: ConnectError" in str(error.value) for server in servers)
    assert "(3 times in a row)" in str(error.value), "the first attempt and two more"


def test_a_request_that_no_server_can_do_ends_the_run(make_server, make_rollout, model) -> None:
    server = make_server()
    server.fault = lambda number, body: Fault(500, text="assertion") if body["prompt"][-1] == 3 else None
    rollout = make_rollout(server, retries=2)
    rollout.update_weights(0, model)
    bad, *good = REQUESTS
    rollout.submit(bad)
    with pytest.raises(ServerError, match="no server is left|failed to write a token of one request"):
        while True:
            for request in good:
                rollout.submit(request)
            rollout.poll()


def changed(**changes: Any) -> Fault:
    return Fault(change=lambda event: {**event, "choices": [{**event["choices"][0], **changes}]})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (changed(token_ids=None), "returns no token ids, because it does not support return_token_ids"),
        (changed(logprobs=None), "returns no log-probabilities"),
        (changed(logprobs={"token_logprobs": [-1.0, -2.0]}), "1 token ids with 2 log-probabilities"),
        (changed(logprobs={"token_logprobs": [None]}), "returns the invalid log-probability None"),
        (changed(logprobs={"token_logprobs": [0.5]}), "returns the invalid log-probability 0.5"),
        (changed(token_ids=[61]), "returns token id 61, but the vocabulary has 0..60"),
        (changed(token_ids=["5"]), "returns token id '5'"),
        (
            changed(token_ids=[STOP, 1], logprobs={"token_logprobs": [-1.0, -1.0]}),
            "continues a response after a stop token",
        ),
        (
            changed(token_ids=[1] * 13, logprobs={"token_logprobs": [-1.0] * 13}),
            "continues a response after max_tokens",
        ),
        (Fault(change=lambda event: "{'token_ids': [1]}"), "sent an event that is not a JSON object"),
        (Fault(change=lambda event: "[1, 2]"), "sent an event that is not a JSON object"),
        (Fault(change=lambda event: '{"error": {"message": "no such model", "code": 404}}'), "no such model"),
        (Fault(200, {"Content-Type": "text/html"}), "answers with text/html, not with a stream"),
        (Fault(302, {"Location": "http://127.0.0.1:1/"}), "refuses the request: status 302"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(make_server, make_rollout, model, fault, message) -> None:
    server = make_server()
    server.fault = lambda number, body: fault
    rollout = make_rollout(server)
    rollout.update_weights(0, model)
    with pytest.raises(ServerError, match=message):
        run(rollout, [Request((1, 2, 3), max_tokens=12, seed=5, stop=frozenset([STOP]))])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reason", "message"), [("length", "its context length is too short"), ("stop", "stopped after token")]
)
def test_a_response_that_ends_by_the_servers_rules_is_refused(
    make_server, make_rollout, model, reason, message
) -> None:
    server = make_server()

    def shorter(number: int, body: dict) -> None:
        body["max_tokens"] = 3
        return Fault(change=lambda event: {**event, "choices": [_ended(event, reason)]})

    server.fault = shorter
    rollout = make_rollout(server)
    rollout.update_weights(0, model)
    with pytest.raises(ServerError, match=message):
        run(rollout, [Request((1, 2, 3), max_tokens=12, seed=5)])


def _ended(event: dict, reason: str) -> dict:
    choice = event["choices"][0]
    return {**choice, "finish_reason": choice["finish_reason"] and reason}


@pytest.mark.parametrize(
    "change",
    [lambda event: event if event["choices"] else {"choices": []}, lambda event: {**event, **routed(event, "AAAA")}],
)
def test_routing_that_was_asked_for_must_come(make_server, make_rollout, model, change) -> None:
    server = make_server()
    server.fault = lambda number, body: Fault(change=change)
    rollout = make_rollout(server, routing=True)
    rollout.update_weights(0, model)
    with pytest.raises(
        ServerError, match="returns no routed experts|returns routed experts that do not have the shape"
    ):
        run(rollout)


def routed(event: dict, text: str) -> dict:
    return {"sglext": {"routed_experts": text}} if "sglext" in event else {}


def test_new_weights_interrupt_and_go_on(make_server, make_rollout, model, tmp_path: Path) -> None:
    """Every token is of the policy that it says, the ones that were there stay, and old folders go."""
    servers = [make_server(hold=5), make_server(hold=5)]
    rollout = make_rollout(*servers)
    other = tiny_model(seed=1)
    rollout.update_weights(0, model)
    for n in range(4):
        rollout.submit(Request((1, 2, 3 + n), max_tokens=24, seed=n))
    until(lambda: min(lengths(rollout)) > 3)
    written = []

    def export(policy: DeepseekV41, folder: Path) -> None:
        written.append(lengths(rollout))
        for server in servers:
            server.hold = math.inf
        save_pretrained(policy, folder)
        until(lambda: not any(server.streams for server in servers))  # broken off, or written to the end
        written.append(lengths(rollout))

    rollout.export = export
    rollout.update_weights(1, other)
    assert written[0] == written[1], "nothing is drawn while weights change"
    samples = finish(rollout)
    assert all(server.version == "1" and len(server.bodies) == 4 for server in servers)
    prompts = [body["prompt"] for server in servers for body in server.bodies[2:]]
    for sample in samples:
        old = sample.versions.count(0)
        assert sample.versions == [0] * old + [1] * (24 - old) and 3 < old < 24
        assert [*sample.request.prompt, *sample.tokens[:old]] in prompts
        assert_drawn_from(model, sample, slice(old))
        assert_drawn_from(other, sample, slice(old, None))
    rollout.update_weights(2, model)
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["version-00000001", "version-00000002"]


def lengths(rollout: HttpRollout) -> list[int]:
    return [len(sample.tokens) for sample in rollout.samples.values()]


def test_what_ends_before_new_weights_is_handed_over_once(make_server, make_rollout, model) -> None:
    rollout = make_rollout(make_server())
    rollout.update_weights(0, model)
    rollout.submit(Request((1, 2, 3), max_tokens=2))
    until(lambda: lengths(rollout) == [2])
    rollout.update_weights(1, model)
    assert [sample.versions for sample in finish(rollout)] == [[0, 0]]
    assert rollout.poll() == []


def test_a_server_that_does_not_load_weights_is_left_out(make_server, make_rollout, model, expected) -> None:
    good, refuses, lies = make_server(), make_server(), make_server()
    rollout = make_rollout(good, refuses, lies)
    rollout.update_weights(0, model)
    refuses.refuse_weights = True
    load = lies.load

    def pretend(body: dict) -> tuple[int, dict]:
        answer = load(body)
        lies.version = "0"
        return answer

    lies.load = pretend
    rollout.update_weights(1, model)
    samples = run(rollout)
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    assert len(good.bodies) == 6 and not refuses.bodies and not lies.bodies
    told = "\n".join(rollout.notes())
    assert "out of memory" in told and "serves weights of version '0' after it was told to load version '1'" in told
    good.refuse_weights = True
    with pytest.raises(ServerError, match="no server is left") as error:
        rollout.update_weights(2, model)
    assert all(server.url in str(error.value) for server in (good, refuses, lies))


def test_a_server_that_never_was_there_is_waited_for_and_left_out(make_server, make_rollout, model) -> None:
    server = make_server()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens there
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        rollout = make_rollout(server, urls=[nobody, server.url])
        rollout.update_weights(0, model)
        assert len(run(rollout)) == 6
    assert [nobody in note and "could not load the weights" in note for note in rollout.notes()] == [True]


def test_what_has_begun_survives(make_server, make_rollout, model, tmp_path: Path) -> None:
    """The tokens that were there are not written again, what had finished is handed over."""
    server = make_server(hold=5)
    rollout = make_rollout(server)
    rollout.update_weights(3, model)
    rollout.submit(Request((1, 2), max_tokens=2, seed=0))
    for n in range(3):
        rollout.submit(Request((1, 2, 3 + n), max_tokens=24, seed=n))
    until(lambda: all(len(sample.tokens) > 3 or sample.finish for sample in rollout.samples.values()))
    torch.save(rollout.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    server.close()
    saved = {one["id"]: one["tokens"] for one in state["samples"]}
    again = make_server()
    second = make_rollout(again)
    second.load_state_dict(state)
    assert second.in_flight == 4 and again.paths == []
    assert second.submit(Request((1,), max_tokens=1)) == 4
    second.update_weights(4, model)
    samples = finish(second)
    assert [len(sample.tokens) for sample in samples] == [2, 24, 24, 24, 1] and len(again.bodies) == 4
    for sample in samples[1:4]:
        old = len(saved[sample.id])
        assert sample.tokens[:old] == saved[sample.id] and sample.versions == [3] * old + [4] * (24 - old)
        assert_drawn_from(model, sample)


def test_the_key_comes_from_the_environment_and_stays_there(make_server, make_rollout, model, monkeypatch) -> None:
    monkeypatch.setenv("TOY_KEY", "sesame-17")
    monkeypatch.setenv("WRONG_KEY", "hunter-2")
    server = make_server(key="sesame-17")
    rollout = make_rollout(server, key_variable="TOY_KEY")
    rollout.update_weights(0, model)
    assert len(run(rollout)) == 6
    rollout = make_rollout(server, key_variable="WRONG_KEY")
    rollout.update_weights(0, model)
    with pytest.raises(ServerError, match=r"status 401 .*\*\*\*.*rl.rollout.key_variable") as error:
        run(rollout)
    assert "hunter-2" not in str(error.value)


def test_one_more_rollout_shares_the_servers_and_nothing_else(make_server, make_rollout, model, expected) -> None:
    rollout = make_rollout(make_server())
    rollout.update_weights(0, model)
    rollout.submit(REQUESTS[5])
    other = rollout.apart()
    assert_same(run(other), expected)
    other.close()
    assert [sample.tokens for sample in finish(rollout)] == [expected[5].tokens]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rl.rollout.urls=[]", "rl.rollout.urls"),
        ("rl.rollout.urls=[localhost:8000]", "must be a server's address without a path"),
        ("rl.rollout.urls=['http://a:1/v1']", "http://a:1/v1.: must be a server's address without a path"),
        ("rl.rollout.urls=['http://me:secret@a:1']", "an address contains a password.*key_variable"),
        ("rl.rollout.urls=['http://a:1','http://a:1']", "lists a server twice"),
        ("rl.rollout.key_variable=NO_SUCH_VARIABLE", "rl.rollout.key_variable = .NO_SUCH_VARIABLE.: .*not set"),
        ("rl.rollout.update=[{path: /load, body: {}}]", "rl.rollout.update: no request body contains {folder}"),
        ("rl.rollout.update=[{path: load, body: {}}]", "rl.rollout.update.0.path"),
        ("rl.rollout.retries=-1", "rl.rollout.retries"),
        ("rl.rollout.retires=1", "rl.rollout.retires = 1: no such key. Did you mean rl.rollout.retries"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make_rl, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_rl("rollout=vllm", "rl.rollout.urls=['http://a:1']", change)
    assert "secret" not in str(error.value)


def test_several_wrong_settings_are_named_at_once(make_rl) -> None:
    with pytest.raises(ConfigError) as error:
        make_rl("rollout=sglang", "rl.rollout.urls=[a,b]", "rl.rollout.key_variable=NO_SUCH_VARIABLE", "lora=attention")
    for text in ('urls: "a": must', 'urls: "b": must', "key_variable = ", "cannot load an adapter. Use rollout=local"):
        assert sum(text in problem for problem in error.value.problems) == 1, error.value


def test_servers_lift_the_bound_on_a_spread_model(make_rl) -> None:
    spread = ["parallel.world_size=2", "parallel.expert_parallel=2", "parallel.table_shards=2"]
    make_rl("rollout=sglang", "rl.rollout.urls=['http://a:1']", *spread)
    with pytest.raises(ConfigError, match=r"Use 1, or let servers write them \(rollout=sglang\)"):
        make_rl(*spread)


def steps_of(config: Config) -> list[dict]:
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_a_run_over_servers(make_rl, make_server, servers_of) -> None:
    """The servers follow the policy: the tokens of every step are as likely in training as they were there."""
    servers = [make_server(), make_server()]
    config = make_rl(*servers_of(*servers), "task.tokens=1200")
    rl.run(config)
    steps = steps_of(config)
    assert len(steps) >= 2 and all(server.bodies for server in servers)
    for step in steps:
        assert step["responses"] == 12 and step["version_lag"] == 0
        assert step["ratio"] == pytest.approx(1, abs=3e-3) and abs(step["approx_kl"]) < 3e-3
    assert {server.version for server in servers} == {str(len(steps))}
    names = sorted(path.name for path in (config.run_dir / "policy").iterdir())
    assert names == [f"version-{n:08d}" for n in (len(steps) - 1, len(steps))]
    assert (config.run_dir / "policy" / names[-1] / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_run_over_servers_is_stopped_in_the_middle_and_goes_on(make_rl, make_server, servers_of, monkeypatch) -> None:
    """With responses in flight over several policies, without routing, and with one server that is gone meanwhile."""
    servers = [make_server(), make_server()]
    changes = [*servers_of(*servers), "rl.rollout.routing=false", "rl.ahead=1.0", "task.tokens=2500"]
    inner = HttpRollout.poll

    def hold(tokens: float) -> None:
        for server in servers:
            server.hold = tokens

    def held_back() -> list[list[int]]:
        """What the servers have not finished, and do not go on with: prompts with the tokens so far."""
        found = []
        for server in servers:
            with server.lock:
                found += [[*one.request.prompt, *one.tokens] for one, *_ in server.streams.values()]
        return found

    def poll(self: HttpRollout) -> list[Sample]:
        if self.version and servers[0].hold:
            hold(0)
            begun = [[*sample.request.prompt, *sample.tokens] for sample in self.samples.values() if sample.tokens]
            if any(text[: len(one)] == one for text in held_back() for one in begun):
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                hold(math.inf)
        return inner(self)

    with monkeypatch.context() as patch:
        patch.setattr(HttpRollout, "poll", poll)
        with pytest.raises(Interrupted):
            rl.run(make_rl(*changes))
    config = make_rl(*changes)
    path = max((config.run_dir / "rollout").glob("step-*.pt"))
    begun = torch.load(path, weights_only=True)["rollout"]["samples"]
    assert any(sample["tokens"] and not sample["finish"] for sample in begun)
    servers[0].close()
    hold(math.inf)
    asked = len(servers[1].bodies)
    rl.run(config)
    prompts = [tuple(body["prompt"]) for body in servers[1].bodies[asked:]]
    for sample in begun:
        if not sample["finish"]:
            assert (*sample["request"]["prompt"], *sample["tokens"]) in prompts
    steps = steps_of(config)
    assert any(step["version_lag"] > 0 for step in steps) and [s["step"] for s in steps] == [*range(1, len(steps) + 1)]
    log = (config.run_dir / "train.log").read_text()
    assert f"server {servers[0].url} is left out until it loads new weights" in log


@pytest.mark.slow
def test_a_run_without_any_server_ends_with_a_message(make_rl, make_server, servers_of) -> None:
    server = make_server()
    config = make_rl(*servers_of(server))
    server.close()
    message = f"no server is left:\n  - {server.url}: the server could not load the weights: ConnectError"
    with pytest.raises(ServerError, match=message):
        rl.run(config)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("split", [("expert_parallel=2", "table_shards=2"), ("dense_shards=2",)], ids=" ".join)
def test_a_spread_policy_is_served_whole(make_rl, make_server, servers_of, tmp_path: Path, split: tuple) -> None:
    """Two processes with half of the experts and tables each, or with half of the rows of dense matrices, write it
    together, and ask for their own responses. With divided dense matrices there is no reference.
    """
    servers, kl = [make_server(), make_server()], "dense_shards=2" not in split
    spread = [f"parallel.{text}" for text in ("world_size=2", *split)]
    changes = [*servers_of(*servers), *spread, "task.tokens=1200", f"rl.loss.kl={0.01 * kl}"]
    config = make_rl(*changes)
    path = tmp_path / "config.json"
    plain = to_dict(config)
    plain["data"]["tokenizer"] = "train"  # init_from brings its own
    path.write_text(json.dumps(plain))
    script = "import json, sys; from train.config.parse import parse; from train.tasks import rl; "
    script += "rl.run(parse(json.load(open(sys.argv[1]))))"
    for ended in Group(2, ["-c", script, str(path)], tmp_path / "ranks").finish():
        assert ended.code == 0, ended.output
    steps = steps_of(config)
    assert len(steps) >= 2
    for step in steps:
        assert step["responses"] == 12 and step["ratio"] == pytest.approx(1, abs=3e-3)
    assert not kl or abs(steps[0]["kl"]) < 1e-6 < steps[-1]["kl"], "the reference is a spread copy, of the start"
    asked = [tuple(body["prompt"]) for server in servers for body in server.bodies]
    assert len(set(asked)) >= 4, "the processes ask different prompts"
    folder = config.run_dir / "policy" / f"version-{len(steps):08d}"
    assert {server.folder for server in servers} == {folder}
    assert load_pretrained(folder).config.text.n_routed_experts == 4
