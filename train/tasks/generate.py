"""``task=generate``: answers to the prompts of a file, as JSONL; the same command goes on where it was stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from data import DataError
from data.chat.prompt import Prompt
from data.errors import BadRecordPolicy, naming
from data.files import content_hash
from data.records import read_records
from model.generation import Generator
from train.config.schema import Generation
from train.errors import InputError, user_errors
from train.tasks.asked import Model, check_length, conversation, open_model, request, texts

MAY_CHANGE = ("batch", "device", "prompts", "dst", "task")  # of the settings, while a file is being written
OF_RECORD = ("thinking", "effort", "tools", "images", "image")  # what a record may say besides its messages


def run(config: Generation) -> None:
    """Write a line to ``config.dst`` for every prompt: the record, its number, the answer, and why it ended.

    Raises:
        InputError, DataError, OSError: the model, a prompt or the file cannot be used.
    """
    with user_errors():
        prompts = _prompts(Path(config.prompts))
        done = _done(config)
        asked = open_model(config)
        wanted = {n: _prompt(asked, config, record, n) for n, record in enumerate(prompts) if n not in done}
        for prompt in wanted.values():
            check_length(asked, config, prompt)
    if done:
        print(f"{config.dst} holds {len(done):,} of {len(prompts):,} answers; the others follow")
    _generate(asked, config, prompts, wanted)
    print(f"wrote {config.dst}: {len(prompts):,} answers")


@torch.no_grad()
def _generate(asked: Model, config: Generation, records: list[dict[str, Any]], wanted: dict[int, Prompt]) -> None:
    """Answer what is wanted; each answer is written as soon as it is there. Images are decoded just before."""
    generator = Generator(asked.model, max_running=config.batch, drafter=asked.drafter)
    ahead, numbers = list(reversed(wanted)), dict[int, int]()
    with Progress(transient=True) as progress, naming(config.dst), open(config.dst, "a", encoding="utf-8") as file:
        bar = progress.add_task("answers", total=len(records), completed=len(records) - len(wanted))
        while ahead or generator.in_flight:
            while ahead and generator.in_flight < config.batch:
                number = ahead.pop()
                numbers[generator.submit(request(asked, config, wanted[number], config.seed + number))] = number
            for sample in generator.step():
                number = numbers[sample.id]
                found = texts(asked, sample, _thinking(config, records[number]))
                line = {"number": number, **records[number], **found, "finish": sample.finish}
                file.write(json.dumps({**line, "tokens": len(sample.tokens)}, ensure_ascii=False, default=_size) + "\n")
                file.flush()
                progress.advance(bar)


def _size(value: Any) -> str:
    """What stands in the line for the bytes of an image, which JSON cannot hold."""
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else str(value)


def _prompts(path: Path) -> list[dict[str, Any]]:
    """The records of the file. Raises DataError naming file and line of one that cannot be used."""
    if not path.is_file():
        raise DataError(str(path), 0, "missing file", "prompts names a file of records (JSONL, JSON, Parquet, Arrow)")
    found = []
    for item in read_records(path, (), BadRecordPolicy("stop"), lambda names: names):
        if isinstance(item.record, DataError):
            raise item.record
        if not isinstance(item.record, dict) or not any(item.record.get(k) for k in ("messages", "prompt", "text")):
            raise DataError(str(path), item.line, "no prompt", "a record needs prompt, messages or text")
        found.append(item.record)
    return found


def _thinking(config: Generation, record: dict[str, Any]) -> bool:
    """Whether the answer to a record begins with reasoning; a text that is continued has none."""
    conversation = record.get("messages") or record.get("prompt")
    return bool(conversation) and (config.thinking if record.get("thinking") is None else record["thinking"])


def _prompt(asked: Model, config: Generation, record: dict[str, Any], number: int) -> Prompt:
    messages = record.get("messages") or record.get("prompt")
    if not messages:
        if images := [key for key in ("images", "image") if record.get(key)]:
            detail = f"{images[0]} goes with prompt or messages, not with text"
            raise DataError(config.prompts, 0, f"record {number + 1}: image in a text to continue", detail)
        return Prompt(tuple(asked.tokenizer.encode(record["text"], add_special_tokens=False).ids))
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    own = {key: record[key] for key in OF_RECORD if record.get(key) is not None}
    try:
        return conversation(asked, config, {**own, "messages": messages}, config.prompts)
    except DataError as error:
        raise DataError(config.prompts, 0, f"record {number + 1}: {error.reason}", error.detail) from None


def _done(config: Generation) -> set[int]:
    """The numbers of the prompts whose answers the file holds. A line that was cut off is taken out.

    Raises:
        InputError: they were generated by other settings or from other prompts.
    """
    path, beside = Path(config.dst), Path(f"{config.dst}.settings.json")
    settings = {key: value for key, value in asdict(config).items() if key not in MAY_CHANGE}
    settings["prompts"] = content_hash(Path(config.prompts)).hex()[:32]
    if not path.is_file() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return set()
    known = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    if changed := [key for key in settings if known.get(key) != settings[key]]:
        raise InputError(
            f"dst = {config.dst} holds answers under other settings ({', '.join(changed)}): restore them, or name "
            "another file"
        )
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        path.write_bytes(kept)
    return {json.loads(line)["number"] for line in kept.splitlines()}
