"""``task=chat``: a conversation with a model on the terminal. Answers are shown while they are generated."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data import DataError
from data.chat.conversation import effort_budget
from data.images import open_picture
from model.generation import Generator, Sample
from train.config.schema import Chat
from train.errors import user_errors
from train.logging.text import visible
from train.tasks.asked import Model, conversation, open_model, request, texts

HELP = """/new: begin a new conversation    /effort low|high|max|1..100    /thinking on|off    /quit
/system TEXT: begin a new conversation with this system prompt    /undo: remove the last question and its answer
/image PATH: attach an image to the next question; repeat the command for several images"""


def run(config: Chat) -> None:
    """Answer each line from standard input, until standard input ends or a line is /quit.

    Raises:
        InputError, OSError: the model cannot be loaded.
    """
    with user_errors():
        asked = open_model(config)
    with_drafter = ", with its drafter" if asked.drafter else ""
    print(f"{config.init_from}{with_drafter}. /help lists the commands, /quit ends the conversation.")
    messages: list[dict[str, Any]] = []
    images: list[str] = []  # paths of the images that go with the next question
    turn = 0
    for line in _lines():
        if line.startswith("/"):
            again = _command(line, config, messages, images, asked)
            if again is None:
                return
            config = again
            continue
        shown = [{"type": "image", "image": path} for path in images]
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": line}] if shown else line})
        images.clear()
        try:
            answer = _answer(asked, config, messages, config.seed + turn)
        except (DataError, ValueError) as error:
            messages.pop()
            print(f"error: {error}")
            continue
        turn += 1
        if answer["answer"].strip():
            messages.append({"role": "assistant", "content": answer["answer"]})
        else:
            messages.pop()
            print("(the answer did not begin within max_tokens; the question was removed from the conversation)")


def _lines() -> Iterator[str]:
    """Yield the lines that the user enters, except empty ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _command(line: str, config: Chat, messages: list[dict[str, Any]], images: list[str], asked: Model) -> Chat | None:
    """Execute a command such as /new. Returns the settings to continue with, or None to end the conversation."""
    name, _, value = line.partition(" ")
    value = value.strip()
    if name in ("/quit", "/exit"):
        return None
    if name == "/new":
        messages.clear()
        images.clear()
    elif name == "/undo":
        del messages[-2:]
        images.clear()
    elif name == "/image" and value:
        _add_image(value, images, asked)
    elif name == "/system":
        messages.clear()
        return dataclasses.replace(config, system=value or None)
    elif name == "/thinking" and value in ("on", "off"):
        return dataclasses.replace(config, thinking=value == "on")
    elif name == "/effort":
        try:
            effort_budget(effort := int(value) if value.isdecimal() else value)
        except ValueError as error:
            print(f"error: {error}")
        else:
            return dataclasses.replace(config, effort=effort, thinking=True)
    else:
        print(HELP)
    return config


def _add_image(path: str, images: list[str], asked: Model) -> None:
    """Check an image file and attach it to the next question."""
    if asked.vision is None:
        print("error: this model cannot read images, because its config.json has no vision_config")
        return
    path = str(Path(path).expanduser().absolute())
    try:
        picture = open_picture(Path(path), "/image", 0)
    except DataError as error:
        print(f"error: {error.reason}: {error.detail}")
        return
    images.append(path)
    print(f"an image of {picture.width} x {picture.height} pixels goes with the next question")


@torch.no_grad()
def _answer(asked: Model, config: Chat, messages: list[dict[str, Any]], seed: int) -> dict[str, str]:
    """Generate an answer and print it while it is generated."""
    prompt = conversation(asked, config, {"messages": messages})
    generator = Generator(asked.model, max_running=1, drafter=asked.drafter)
    generator.submit(request(asked, config, prompt, seed))
    shown = ""
    finished: list[Sample] = []
    while not finished:
        finished = generator.step()
        sample = finished[0] if finished else generator.running[0].sample
        tokens = [token for token in sample.tokens if token != asked.eos]
        text = asked.tokenizer.decode(tokens, skip_special_tokens=False)
        if finished or not text.endswith("\ufffd"):  # a character may consist of several tokens
            print(visible(text[len(shown) :]), end="", flush=True)
            shown = text
    print()
    return texts(asked, finished[0], config.thinking)
