"""``task=chat`` and ``task=generate``: a model that is asked on the terminal and for a file of prompts."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from data import DataError
from model import build_drafter, save_pretrained
from model.generation import generate as direct
from train.build import build
from train.config.parse import parse
from train.config.problems import ConfigError
from train.config.schema import Asked, SmallTask
from train.errors import InputError
from train.tasks import chat, generate, pretrain
from train.tasks.asked import conversation, open_model, request, texts


@pytest.fixture(scope="module")
def folder(compose_raw, overrides, tmp_path_factory) -> Path:
    """An untrained model with its tokenizer."""
    output = tmp_path_factory.mktemp("asked")
    fresh = build(parse(compose_raw(*overrides, f"output={output}")))
    save_pretrained(fresh.model, output / "model", fresh.tokenizer)
    return output / "model"


@pytest.fixture
def generated(compose_raw, folder: Path, tmp_path: Path):
    """``generated(records, "key=value")``: the lines that are written for them, by number."""

    def run(records: list[dict], *changes: str) -> list[dict]:
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        options = [f"init_from={folder}", f"prompts={tmp_path}/prompts.jsonl", f"dst={tmp_path}/answers.jsonl"]
        generate.run(parse(compose_raw("task=generate", *options, "max_tokens=6", "batch=2", "seed=3", *changes)))
        lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        return sorted(lines, key=lambda line: line["number"])

    return run


@pytest.mark.slow
def test_a_run_is_asked_with_the_rounding_that_it_was_trained_with(compose_raw, overrides, tmp_path: Path) -> None:
    options = (
        f"output={tmp_path}",
        "name=exact",
        "runtime.kv_quant=false",
        "task.tokens=300",
        "checkpoint.export=plain",
    )
    pretrain.run(parse(compose_raw(*overrides, f"output={tmp_path}", *options)))
    assert not open_model(settings(tmp_path, "exact")).model.runtime.kv_quant
    assert open_model(settings(tmp_path, "exact/export")).model.runtime.kv_quant, "an export does not say it"


RECORDS = [
    {"prompt": "one?", "id": "a"},
    {"messages": [{"role": "user", "content": "two?"}], "thinking": True},
    {"text": "def main"},
    {"prompt": "four?"},
    {"prompt": "five?"},
]


def test_every_prompt_is_answered_and_a_stopped_run_goes_on(generated, tmp_path: Path, capsys) -> None:
    whole = generated(RECORDS)
    assert [line["number"] for line in whole] == list(range(5)) and whole[0]["id"] == "a"
    assert all(0 < line["tokens"] <= 6 and line["finish"] in ("stop", "length") for line in whole)
    assert "reasoning" in whole[1] and "reasoning" not in whole[0] and "reasoning" not in whole[2]
    lines = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_text("".join(lines[:2]) + lines[2][:9])  # killed while it wrote the third
    assert generated(RECORDS, "batch=1") == whole, "whatever is asked at the same time"
    assert "already has 2 of 5 answers" in capsys.readouterr().out
    assert generated(RECORDS) == whole
    with pytest.raises(InputError, match=r"answers generated with other settings \(temperature\)"):
        generated(RECORDS, "temperature=0.1")
    with pytest.raises(InputError, match=r"answers generated with other settings \(prompts\)"):
        generated(RECORDS[:4])


@pytest.mark.parametrize(
    ("record", "message"),
    [({"question": "x"}, "prompts.jsonl:1: no prompt"), ({"messages": [{"role": "robot"}]}, "record 1: unknown role")],
)
def test_a_bad_prompt_is_named_before_anything_is_generated(generated, record, message, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        generated([record])
    assert not (tmp_path / "answers.jsonl").exists()


def test_an_answer_that_does_not_fit_is_refused(generated) -> None:
    with pytest.raises(InputError, match="tokens; lower max_tokens"):
        generated(RECORDS, "max_tokens=100000000")


def test_a_chat_on_the_terminal(compose_raw, folder: Path, monkeypatch, capsys) -> None:
    said = [
        "hello",
        "/help",
        "/effort low",
        "/effort 101",
        "/undo",
        "again\x1b[31m",
        "/thinking off",
        "/new",
        "",
        "/quit",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*said, "not read"])))
    chat.run(parse(compose_raw("task=chat", f"init_from={folder}", "max_tokens=5", "temperature=1.0")))
    out = capsys.readouterr().out
    assert "/quit ends" in out and "/new: begin a new conversation" in out
    assert "effort=101: must be one of" in out and "\x1b" not in out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    chat.run(parse(compose_raw("task=chat", f"init_from={folder}", "max_tokens=5", "temperature=1.0")))
    again = capsys.readouterr().out
    assert out.splitlines()[1] == again.splitlines()[1], "the same seed gives the same answer"


VISION = ["model=study_vision", "model.text_config.vocab_size=512", "model.text_config.n_routed_experts=4"]
LOOK = {"messages": [{"role": "user", "content": "<image> and <image> differ?"}], "images": ["dark.png", "bright.png"]}


@pytest.fixture(scope="module")
def seeing(compose_raw, overrides, tmp_path_factory) -> Path:
    """A folder with an untrained model that reads images (`model`: tokenizer and drafter too), and two images."""
    output = tmp_path_factory.mktemp("seeing")
    drafter = {"num_nextn_predict_layers": 1, "dspark_target_layer_ids": "[1]", "dspark_noise_token_id": 11}
    sizes = [f"model.text_config.{key}={value}" for key, value in drafter.items()]
    fresh = build(parse(compose_raw(*overrides, *VISION, *sizes, f"output={output}")))
    save_pretrained(fresh.model, output / "model", fresh.tokenizer, drafter=build_drafter(fresh.model, 3))
    for name, grey in (("dark", 20), ("bright", 240)):
        Image.new("L", (8, 8), grey).save(output / f"{name}.png")
    return output


def settings(seeing: Path, name: str = "model") -> Asked:
    common = dict(device="cpu", thinking=False, effort="high", system=None, max_tokens=6, temperature=0.0, top_p=1.0)
    return Asked(task=SmallTask("generate"), init_from=str(seeing / name), seed=3, **common)


def test_a_prompt_with_images_is_trainings_batch_up_to_the_answer(seeing: Path, make_config) -> None:
    record = {**LOOK, "messages": [*LOOK["messages"], {"role": "assistant", "content": "Yes."}]}
    for name in ("chats", "others"):
        (seeing / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    files = [f"data.paths=[{seeing}/chats.jsonl]", f"data.validation_paths=[{seeing}/others.jsonl]"]
    sizes = ["data.source=chat", "data.field=messages", "task.global_batch_rows=2", "task.seq_len=128"]
    run = build(make_config("task=sft", f"init_from={seeing}/model", *files, *sizes))
    batch = next(iter(run.train_batches))
    prompt = conversation(open_model(settings(seeing)), settings(seeing), LOOK, str(seeing / "prompts.jsonl"))
    count, images = len(prompt.ids), prompt.images()
    assert images is not None and count > 2 * 16
    assert batch["input_ids"][0, :count].tolist() == list(prompt.ids)
    assert torch.equal(batch["vision_token_types"][0, :count], images["vision_token_types"])
    assert torch.equal(batch["pixel_values"][: 2 * 16], images["pixel_values"])
    assert torch.equal(batch["image_grid_hws"][:2], images["image_grid_hws"])


def test_answers_about_images_of_a_file(seeing: Path, compose_raw) -> None:
    """The greedy answer with a drafter is the likeliest token by token, in one pass over prompt and answer."""
    blind = {"prompt": "and without?"}
    (seeing / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (LOOK, blind)))
    options = [f"init_from={seeing}/model", f"prompts={seeing}/prompts.jsonl", f"dst={seeing}/answers.jsonl"]
    generate.run(parse(compose_raw("task=generate", *options, "max_tokens=6", "temperature=0", "seed=3")))
    lines = {n["number"]: n for n in map(json.loads, (seeing / "answers.jsonl").read_text().splitlines())}
    asked, config = open_model(settings(seeing)), settings(seeing)
    assert asked.drafter is not None and lines[0]["images"] == LOOK["images"] and lines[1]["finish"]
    prompt = conversation(asked, config, LOOK, str(seeing / "prompts.jsonl"))
    (sample,) = direct(asked.model, [request(asked, config, prompt, 3)])
    assert lines[0]["answer"] == texts(asked, sample, False)["answer"]
    images = prompt.images()
    ids = torch.tensor([[*prompt.ids, *sample.tokens]])
    types = F.pad(images.pop("vision_token_types"), (0, len(sample.tokens)), value=-1)[None]
    with torch.no_grad():
        logits = asked.model(input_ids=ids, vision_token_types=types, **images).logits[0, len(prompt.ids) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert behind.max() < 0.02, "rounding may choose between two tokens that are all but equally likely"


def test_images_in_a_chat(seeing: Path, folder: Path, compose_raw, monkeypatch, capsys) -> None:
    asked = []
    monkeypatch.setattr(chat, "request", lambda *given: asked.append(given[2]) or request(*given))

    def say(model: Path, *lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        chat.run(parse(compose_raw("task=chat", f"init_from={model}", "max_tokens=3", "temperature=0")))
        return capsys.readouterr().out

    image = f"/image {seeing}/dark.png"
    out = say(seeing / "model", image, "what is it?", image, "/new", "hello", f"/image {seeing}/none.png")
    assert "with its drafter" in out and "8 x 8 pixels goes with the next question" in out
    assert "error: missing image" in out
    assert [len(prompt.pictures) for prompt in asked] == [1, 0], "/new forgets the image too"
    assert "cannot read images" in say(folder, image)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**LOOK, "images": ["gone.png", "dark.png"]}, "record 1: missing image"),
        ({**LOOK, "images": ["dark.png"]}, "1 images for 2 marks"),
        ({"text": "go on", "images": ["dark.png"]}, "images goes with prompt or messages"),
    ],
)
def test_bad_images_are_named_before_anything_is_generated(seeing: Path, compose_raw, record, message) -> None:
    (seeing / "bad.jsonl").write_text(json.dumps(record) + "\n")
    options = [f"init_from={seeing}/model", f"prompts={seeing}/bad.jsonl", f"dst={seeing}/bad-answers.jsonl"]
    with pytest.raises(DataError, match=message):
        generate.run(parse(compose_raw("task=generate", *options)))


def test_an_image_for_a_model_that_reads_none_is_refused(generated, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 1).save(tmp_path / "dark.png")
    with pytest.raises(DataError, match="image for a model without vision"):
        generated([{"prompt": "what is it?", "image": "dark.png"}])


def test_what_is_missing_or_wrong_is_named(compose_raw, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_from"):
        parse(compose_raw("task=chat"))
    with pytest.raises(ConfigError, match="top_p = 2"):
        parse(compose_raw("task=chat", f"init_from={folder}", "top_p=2"))
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="tokenizer.json does not exist"):
        chat.run(parse(compose_raw("task=chat", f"init_from={tmp_path}/broken")))
