"""``task=generate``: answers the prompts in a file and writes JSONL. Repeating the command continues an interrupted
run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data import DataError
from data.chat.prompt import Prompt
from data.errors import BadRecordPolicy, naming
from data.files import content_hash
from data.progress import progress
from data.records import read_records
from model.generation import Generator
from train.config.schema import Generation
from train.errors import InputError, user_errors
from train.tasks.asked import Model, check_length, conversation, open_model, request, texts

MAY_CHANGE = ("batch", "device", "prompts", "dst", "task")  # settings that may differ when a file is continued
OF_RECORD = ("thinking", "effort", "tools", "images", "image")  # fields that a record may have besides its messages


def run(config: Generation) -> None:
    """Answer every prompt, and write a line for each answer to ``config.dst``: the record of the prompt, its number,
    the answer, and the reason why the answer ended.

    Raises:
        InputError, DataError, OSError: the model, a prompt or the output file cannot be used.
    """
    with user_errors():
        prompts = _prompts(Path(config.prompts))
        done = _done(config)
        asked = open_model(config)
        wanted = {n: _prompt(asked, config, record, n) for n, record in enumerate(prompts) if n not in done}
        for prompt in wanted.values():
            check_length(asked, config, prompt)
    if done:
        print(f"{config.dst} already has {len(done):,} of {len(prompts):,} answers; the missing ones are generated")
    _generate(asked, config, prompts, wanted)
    print(f"wrote {config.dst}: {len(prompts):,} answers")


@torch.no_grad()
def _generate(asked: Model, config: Generation, records: list[dict[str, Any]], wanted: dict[int, Prompt]) -> None:
    """Answer the prompts in ``wanted``. Each answer is written as soon as it is complete.

    The images of a prompt are decoded just before the prompt is processed.
    """
    generator = Generator(asked.model, max_running=config.batch, drafter=asked.drafter)
    ahead, numbers = list(reversed(wanted)), dict[int, int]()
    with (
        progress("answering", len(wanted)) as advance,
        naming(config.dst),
        open(config.dst, "a", encoding="utf-8") as file,
    ):
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
                advance(1)


def _size(value: Any) -> str:
    """Describe the bytes of an image for the output line, since JSON cannot store bytes."""
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else str(value)


def _prompts(path: Path) -> list[dict[str, Any]]:
    """Read the records of the file. Raises DataError, naming file and line, if a record cannot be used."""
    if not path.is_file():
        raise DataError(str(path), 0, "missing file", "prompts must name a JSONL, JSON, Parquet or Arrow file")
    found = []
    for item in read_records(path, (), BadRecordPolicy("stop"), lambda names: names):
        if isinstance(item.record, DataError):
            raise item.record
        if not isinstance(item.record, dict) or not any(item.record.get(k) for k in ("messages", "prompt", "text")):
            raise DataError(str(path), item.line, "no prompt", "a record needs prompt, messages or text")
        found.append(item.record)
    return found


def _thinking(config: Generation, record: dict[str, Any]) -> bool:
    """Return whether the answer to a record begins with reasoning. The continuation of a text has no reasoning."""
    conversation = record.get("messages") or record.get("prompt")
    return bool(conversation) and (config.thinking if record.get("thinking") is None else record["thinking"])


def _prompt(asked: Model, config: Generation, record: dict[str, Any], number: int) -> Prompt:
    messages = record.get("messages") or record.get("prompt")
    if not messages:
        if images := [key for key in ("images", "image") if record.get(key)]:
            detail = f"{images[0]} goes with prompt or messages, not with text"
            raise DataError(
                config.prompts, 0, f"record {number + 1}: a plain-text prompt cannot contain an image", detail
            )
        return Prompt(tuple(asked.tokenizer.encode(record["text"], add_special_tokens=False).ids))
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    own = {key: record[key] for key in OF_RECORD if record.get(key) is not None}
    try:
        return conversation(asked, config, {**own, "messages": messages}, config.prompts)
    except DataError as error:
        raise DataError(config.prompts, 0, f"record {number + 1}: {error.reason}", error.detail) from None


def _done(config: Generation) -> set[int]:
    """Return the indices of the prompts whose answers ``config.dst`` already contains. An incomplete last line is
    removed.

    Raises:
        InputError: the answers in the file were generated with other settings or from other prompts.
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
            f"dst = {config.dst} holds answers generated with other settings ({', '.join(changed)}): restore these "
            "settings, or name another file"
        )
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        path.write_bytes(kept)
    return {json.loads(line)["number"] for line in kept.splitlines()}
