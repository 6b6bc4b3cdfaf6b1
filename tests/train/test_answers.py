"""``data.answers=own``: the answers of conversations are the model's own, and what was generated is never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data import DataError
from data.chat.source import ChatLines
from data.errors import BadRecordPolicy
from data.files import find_files
from data.tokens import Encoder
from model import Generator, Request, generate, load_pretrained
from tests.model.tiny import no_rounding  # noqa: F401
from tests.train.test_resume import numbers
from train import answers
from train.build import build
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Config
from train.tasks import dspark, pretrain

SHAPE = (
    "{num_nextn_predict_layers: 1, dspark_block_size: 3, dspark_noise_token_id: 511, dspark_markov_rank: 8, "
    "dspark_target_layer_ids: [2, 5], dspark_n_routed_experts: 4, dspark_num_experts_per_tok: 2}"
)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Conversations of two turns, of which the first answers can be learned."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    talks = [
        [turn("user", f"{n}"), turn("assistant", "a"), turn("user", f"{n}?"), turn("assistant", "b")] for n in range(24)
    ]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def origin(compose_raw, overrides, chats: Path, tmp_path_factory) -> Path:
    """A model that has learned to end its answers."""
    output = tmp_path_factory.mktemp("backbone")
    common = [*overrides, f"output={output}", "checkpoint.export=plain", "optim.schedule.peak=1.0e-2"]
    base = parse(compose_raw(*common, "name=base", "task.tokens=300"))
    pretrain.run(base)
    common = [text for text in common if not text.startswith(("model=", "data.source", "data.paths", "data.valid"))]
    mine = ["task=sft", "optim=report", f"init_from={base.run_dir}/export", f"data.paths=[{chats}]"]
    config = parse(compose_raw(*common, *mine, "name=tuned", "task.tokens=4000", "data.validation_share=0.2"))
    pretrain.run(config)
    return config.run_dir / "export"


@pytest.fixture
def make(compose_raw, overrides, origin: Path, chats: Path, tmp_path: Path):
    left_out = ("model=", "task.sample", "data.source", "data.paths", "data.valid", "data.cache")
    kept = [text for text in overrides if not text.startswith(left_out)]

    def made(*changes: str) -> Config:
        fixed = [f"output={tmp_path}", f"init_from={origin}", f"dspark.drafter={SHAPE}", f"data.paths=[{chats}]"]
        fixed += ["task=dspark", "data=chat", "data.answers=own", "dspark.answer_tokens=6", "dspark.answer_batch=5"]
        fixed += ["dspark.tokens_per_anchor=1", "data.validation_share=0.2", f"data.cache_dir={tmp_path}/cache"]
        return parse(compose_raw(*kept, *fixed, "task.tokens=500", *changes))

    return made


def written(folder: Path) -> dict[str, list[dict]]:
    """The lines of the finished files of a cache."""
    (folder,) = folder.glob("answers-*")
    lines = {split: (folder / f"{split}.jsonl").read_text().splitlines() for split in answers.SPLITS}
    return {split: list(map(json.loads, some)) for split, some in lines.items()}


def spans(line: dict) -> list[tuple[list[int], int]]:
    """A line as spans of token ids, given (0) or generated (1)."""
    found: list[tuple[list[int], int]] = []
    for token, own in zip(line["input_ids"], line["loss_mask"], strict=True):
        if not found or found[-1][1] != own:
            found.append(([], own))
        found[-1][0].append(token)
    return found


@pytest.mark.slow
def test_every_answer_is_what_the_model_says(make, chats: Path, origin: Path, tmp_path: Path, no_rounding) -> None:  # noqa: F811
    """Greedily, behind its own earlier answers; what is not an answer stays as it is."""
    run = build(make("dspark.answer_temperature=0.0"))
    assert any("train data with the model's own answers: " in note for note in run.notes)
    found = written(tmp_path / "cache")
    lines = [*found["train"], *found["held-out"]]
    assert len(lines) == 24 and len(found["held-out"]) >= 2
    source = ChatLines(find_files([str(chats)], (".jsonl",)), "messages", "auto")
    policy = BadRecordPolicy("stop")
    encoder = Encoder(run.tokenizer, 64, None, False, conversations=True)
    given = [
        spans({"input_ids": e.ids.tolist(), "loss_mask": e.loss_mask.tolist()})
        for e in encoder.encode_all((document for document, _ in source.read(policy)), policy)
    ]
    built = load_pretrained(origin)
    eos, complete = built.config.text.eos_token_id, 0
    for line in lines:
        parts, before = spans(line), list[int]()
        kept = [tokens for tokens, own in parts if not own]
        assert any(kept == [tokens for tokens, own in talk if not own][: len(kept)] for talk in given)
        for tokens, own in parts:
            if own:
                request = Request(tuple(before), 6, temperature=0, stop=frozenset({eos}))
                (sample,) = generate(built, [request])
                assert tokens == sample.tokens[: len(tokens)] and len(sample.tokens) - len(tokens) <= 1
                assert (tokens[-1] == eos) == (sample.finish == "stop")
                complete += sample.finish == "stop"
            before += tokens
    assert complete > 24, "most conversations have two complete answers"


@pytest.mark.slow
def test_a_stopped_generation_goes_on(make, tmp_path: Path, monkeypatch, no_rounding) -> None:  # noqa: F811
    """Also inside a line; and nothing is generated twice."""
    build(make(f"data.cache_dir={tmp_path}/whole"))
    original, steps = Generator.step, [0]

    def stopping(self):
        steps[0] += 1
        if steps[0] == 12:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            build(make())
    (part,) = (tmp_path / "cache").glob("answers-*/train.part-0")
    before = part.read_text()
    assert 2 <= before.count("\n") < 15
    part.write_text(before + '{"number": 3, "inp')
    asked, submit = [], Generator.submit
    monkeypatch.setattr(Generator, "submit", lambda self, request: asked.append(request) or submit(self, request))
    build(make())
    assert written(tmp_path / "cache") == written(tmp_path / "whole")
    assert part.read_text().startswith(before) and part.read_text().count("\n") < 24
    asked.clear()
    build(make())
    assert not asked
    build(make("dspark.answer_tokens=5"))
    assert asked and len(list((tmp_path / "cache").glob("answers-*"))) == 2


@pytest.mark.slow
def test_a_drafter_learns_from_them(make, origin: Path, tmp_path: Path) -> None:
    """It is trained on what was generated, and a run that is continued is the same."""
    whole = make("name=whole", "task.tokens=2000", "optim.schedule.peak=1.0e-2")
    dspark.run(whole)
    first, last = (record for record in numbers(whole.run_dir) if record["kind"] == "valid")
    assert last["loss"] < 0.9 * first["loss"]
    dspark.run(make("name=parts", "task.tokens=700", "optim.schedule.peak=1.0e-2"))
    config = make("name=parts", "task.tokens=2000", "optim.schedule.peak=1.0e-2")
    dspark.run(config)
    stopped = numbers(config.run_dir)[-1]["step"]
    kept = [r for r in numbers(config.run_dir) if r["kind"] == "train" or r["step"] in (0, stopped)]
    assert kept == numbers(whole.run_dir)
    mine = {tuple(line["input_ids"]) for line in written(tmp_path / "cache")["train"]}
    batch = next(iter(build(config).train_batches))
    ends = batch["seq_lens"][0].cumsum(0)
    for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        ids = tuple(batch["input_ids"][0, start:end].tolist())
        assert end == start or ids in mine or ids[:-1] in mine


def test_answers_fill_a_row_at_most(make, tmp_path: Path) -> None:
    build(make("task.seq_len=16", "dspark.answer_tokens=50", "dspark.answer_temperature=2.0", "data.on_error=skip"))
    lengths = [len(line["input_ids"]) for line in written(tmp_path / "cache")["train"]]
    assert max(lengths) == 15, "a row has room for the end token"


def test_what_cannot_be_answered_is_refused(make, compose_raw, overrides, origin: Path, chats: Path) -> None:
    for changes, message in (
        (("data.source=text",), "data.answers='own': needs conversations that are not streamed"),
        (("data.answers=mine",), "data.answers='mine': must be given or own"),
        (("parallel.expert_parallel=2", "parallel.world_size=2"), "works alone, with the whole model"),
        (
            ("data.mixture={a: {weight: 1, source: chat, paths: [x]}}",),
            "data.answers='own': must be given with data.mixture",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make(*changes)
    fixed = ["task=sft", "data=chat", f"data.paths=[{chats}]", f"init_from={origin}", "data.answers=own"]
    kept = [text for text in overrides if not text.startswith(("model=", "data.source", "data.paths"))]
    with pytest.raises(ConfigError, match='data.answers = "own": is for the training of drafters'):
        parse(compose_raw(*kept, *fixed))
    with pytest.raises(DataError, match=r"(?s)no own answers.*raise dspark.answer_tokens"):
        build(make("dspark.answer_tokens=1"))
