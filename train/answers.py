"""``data.answers=own``: makes conversations in which every answer is replaced by an answer of the model, for training
the model's drafter.

The supervised tokens of a conversation are its answers. The model generates all answers of a conversation one after
another; each answer continues the conversation with the answers generated so far. The conversations are written as
token ids into JSONL files (``input_ids``, ``loss_mask``), on which the run then trains. A conversation ends with the
first answer that is cut off, by ``dspark.answer_tokens`` or by the end of the row.

The JSONL files are in ``data.cache_dir``; their names depend on the checkpoint, the conversations and the settings. A
conversation is written as soon as it is complete, so an interrupted process continues with the next conversation.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from tokenizers import Tokenizer

from data import DataConfig, DataError, special_ids
from data.build import image_sizes
from data.cache import atomic_file, locked
from data.open import open_sources
from data.progress import progress
from data.tokenizer import identity
from data.tokens import Encoder, TokenStore, tokenised
from model import DeepseekV41, Drafter, Generator, Request, Sample
from train.config.schema import Config
from train.distributed.world import World

SPLITS = ("train", "held-out")


@dataclass
class Conversation:
    """A conversation whose answers are being replaced by generated ones.

    - ids, mask: the tokens so far, and whether each belongs to a generated answer (1) or not (0);
    - rest: the remaining parts of the original conversation, each as a pair (token ids, whether the part is an answer).
    """

    number: int
    rest: deque[tuple[list[int], bool]]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    answers: int = 0

    def advance(self, limit: int) -> bool:
        """Copy the tokens of the original conversation up to its next answer.

        Returns False, and copies nothing, if there is no further answer, or if the conversation with the beginning of
        that answer would exceed `limit` tokens.
        """
        given: list[int] = []
        while self.rest and not self.rest[0][1]:
            given += self.rest.popleft()[0]
        if not self.rest or len(self.ids) + len(given) >= limit:
            return False
        self.add(given, 0)
        return True

    def answer(self, sample: Sample) -> None:
        """Add a generated sample as the next answer.

        If the sample was cut off, the conversation ends with this sample, and the sample's last token is not
        supervised, because the model did not generate the end token that will be added after the sample.
        """
        self.add(sample.tokens, 1)
        self.answers += 1
        self.rest.popleft()
        if sample.finish == "length":
            self.rest.clear()
            self.mask[-1] = 0

    def add(self, tokens: list[int], supervised: int) -> None:
        self.ids += tokens
        self.mask += [supervised] * len(tokens)


def own_answers(
    config: Config, model: DeepseekV41, drafter: Drafter | None, tokenizer: Tokenizer, origin: Path, world: World
) -> tuple[DataConfig, list[str]]:
    """Generate the model's own answers. Returns the data settings that name the new files, and lines for the log.

    All processes call this function together; each process generates a share of the conversations.

    Args:
        drafter: speeds up the generation by speculative decoding; if it is None, there is no drafter.
        origin: the folder that the model was loaded from.

    Raises:
        DataError: the conversations cannot be read, contain images, or leave no room for an answer.
    """
    data, vision = config.data, model.config.vision
    sizes = image_sizes(data, special_ids(tokenizer), None if vision is None else vars(vision))
    encoder = Encoder(tokenizer, config.task.seq_len, sizes, count_bytes=False, conversations=True)
    sources = {split: (source, source.identity()) for split, source in zip(SPLITS, open_sources(data), strict=True)}
    folder = data.cache_path / f"answers-{_key(config, [key for _, key in sources.values()], tokenizer, origin)}"
    notes, files = [], []
    for split, (source, source_id) in sources.items():
        store = tokenised(source, source_id, encoder, data.on_error, data.cache_path)
        if store.pictures:
            detail = "data.answers=own generates answers to text only; leave these conversations out, or use given"
            raise DataError(f"{split} split", 0, "image in a conversation", detail)
        path = folder / f"{split}.jsonl"
        if world.any(not path.is_file()):
            _generate(config, model, drafter, store, folder, split, world)
        notes.append(f"{split} data with the model's own answers: {_counts(path)}: {path}")
        files.append(path)
    paths, held_out = ([str(file)] for file in files)
    return replace(data, paths=paths, validation_paths=held_out, format="tokens", answers="given"), notes


def _generate(
    config: Config,
    model: DeepseekV41,
    drafter: Drafter | None,
    store: TokenStore,
    folder: Path,
    split: str,
    world: World,
) -> None:
    """Write the conversations of a split into ``folder``; conversations that earlier calls have written are skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    done = {line["number"] for part in sorted(folder.glob(f"{split}.part-*")) for line in _lines(part)}
    world.barrier()  # every rank reads before any rank writes
    mine = [n for n in range(len(store)) if n not in done and n % world.size == world.rank]
    own = folder / f"{split}.part-{world.rank}"
    if own.is_file():
        whole = own.read_bytes()
        own.write_bytes(whole[: whole.rfind(b"\n") + 1])
    precision = torch.autocast(world.device.type, torch.bfloat16, enabled=config.parallel.precision == "bf16")
    with own.open("a", encoding="utf-8") as file, precision:
        _write(config, model, drafter, [_conversation(store, n) for n in mine], SPLITS.index(split), file)
    world.barrier()
    if world.first:
        with locked(folder / f"{split}.jsonl"), atomic_file(folder / f"{split}.jsonl") as temporary:
            _merge(folder, split, temporary)
    world.barrier()


def _write(
    config: Config,
    model: DeepseekV41,
    drafter: Drafter | None,
    conversations: list[Conversation],
    split: int,
    file: TextIO,
) -> None:
    """Generate the answers of ``conversations``, and write one line per conversation to ``file``."""
    assert config.dspark is not None
    settings, seq_len, eos = config.dspark, config.task.seq_len, model.config.text.eos_token_id
    generator = Generator(model, max_running=settings.answer_batch, drafter=drafter)
    waiting, running = deque(conversations), dict[int, Conversation]()

    def ask(talk: Conversation) -> None:
        """Request the next answer of a conversation, or write the conversation to the file if it is complete.

        One position of the row stays free for the end token of a conversation that was cut off.
        """
        if talk.advance(seq_len - 1):
            seed = _seed(config.seed, split, talk.number, talk.answers)
            room = min(settings.answer_tokens, seq_len - 1 - len(talk.ids))
            request = Request(tuple(talk.ids), room, settings.answer_temperature, seed=seed, stop=frozenset({eos}))
            running[generator.submit(request)] = talk
            return
        file.write(json.dumps({"number": talk.number, "input_ids": talk.ids, "loss_mask": talk.mask}) + "\n")
        file.flush()
        advance(1)

    with progress("own answers", len(conversations), shared=True) as advance:
        while waiting or running:
            while waiting and generator.in_flight < settings.answer_batch:
                ask(waiting.popleft())
            for sample in generator.step() if running else ():
                talk = running.pop(sample.id)
                talk.answer(sample)
                ask(talk)


def _conversation(store: TokenStore, number: int) -> Conversation:
    """Split a document of a token store into answers and the tokens between the answers.

    An answer ends with its supervised end token. The end token of the whole document is left out, because one is added
    to every document later.
    """
    assert store.loss_mask is not None, "a token store of conversations must have a loss mask"
    span = slice(int(store.offsets[number]), int(store.offsets[number + 1]))
    ids, mask = store.tokens[span].tolist(), np.asarray(store.loss_mask[span])
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return Conversation(number, deque((ids[a:b], bool(mask[a])) for a, b in zip(cuts, cuts[1:], strict=False)))


def _merge(folder: Path, split: str, path: Path) -> None:
    """Merge the conversations that all processes have generated into one file, in their original order.

    Conversations without a supervised token are left out.

    Raises:
        DataError: no conversation has a supervised token.
    """
    found = {line["number"]: line for part in sorted(folder.glob(f"{split}.part-*")) for line in _lines(part)}
    kept = [found[number] for number in sorted(found) if any(found[number]["loss_mask"])]
    if not kept:
        detail = f"all of {len(found)} were cut off at once; raise dspark.answer_tokens or task.seq_len"
        raise DataError(f"{split} split", 0, "no own answers", detail)
    with path.open("w", encoding="utf-8") as file:
        for line in kept:
            file.write(json.dumps({name: line[name] for name in ("input_ids", "loss_mask")}) + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the complete lines of a file that one process has written."""
    whole = path.read_bytes()
    yield from map(json.loads, whole[: whole.rfind(b"\n") + 1].splitlines())


def _counts(path: Path) -> str:
    """Return a text for the log that says how many conversations and answer tokens a file has."""
    lines = list(_lines(path))
    return f"{len(lines):,} conversations, {sum(sum(line['loss_mask']) for line in lines):,} tokens of answers"


def _key(config: Config, sources: list[str], tokenizer: Tokenizer, origin: Path) -> str:
    """Return a key that changes whenever the checkpoint, the conversations or the settings change.

    Checkpoints are distinguished by names, sizes and times of their weight files; the weights are not read.
    """
    assert config.dspark is not None
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(origin.iterdir()) if p.is_file()]
    sampling = config.dspark.answer_tokens, config.dspark.answer_temperature
    settings = (config.seed, config.task.seq_len, config.data.on_error, config.parallel.precision, *sampling)
    return hashlib.blake2b(repr((files, sources, identity(tokenizer), settings)).encode(), digest_size=12).hexdigest()


def _seed(*key: int) -> int:
    """Return a random seed that differs for every ``key``, a tuple of integers."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1
