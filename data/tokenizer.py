"""Tokenizers: a byte-level BPE trained once on the training split, or any Hugging Face fast tokenizer.

Text is data: text that spells a control token is encoded as ordinary text, and control tokens enter a sequence only by
their ids. `guard` makes sure of that, and every tokenizer of this project has passed through it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.cache import atomic_file, locked
from data.errors import DataError

log = logging.getLogger(__name__)

# The released spellings. In a trained tokenizer, ids follow the order of CONTROL_TOKENS, as in the released one.
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, USER, ASSISTANT, SYSTEM = "<｜deepseek_image｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
# Reserved for the drafter, so that training one later does not change the vocabulary.
NOISE = "<｜place▁holder▁no▁0｜>"
THINKING, TOOLS = ("<think>", "</think>"), ("<tool_result>", "</tool_result>")
CONTROL_TOKENS = (BOS, EOS, PAD, IMAGE, USER, ASSISTANT, SYSTEM, *THINKING, *TOOLS, NOISE)

# Words with one leading space, groups of up to three digits (as in the released tokenizer), runs of symbols with the
# line end after them, line ends with the blank lines before them, then indentation up to the last space.
PIECES = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TRAINING_BYTES = 2**28  # more text hardly changes the merges
VERSION = 1  # raise it when training changes, so that cached tokenizers are trained again


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control tokens that the data needs. `bos`, `image`, `noise` are None if the tokenizer lacks them."""

    bos: int | None
    eos: int
    pad: int
    image: int | None
    noise: int | None


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The control tokens of a tokenizer, found by their released spellings or else by spellings common for their roles.

    Without a padding token EOS serves as one. Raises ValueError if there is no end-of-text token, since nothing would
    separate documents.
    """
    alternatives = {
        "bos": (BOS, "<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>"),
        "eos": (EOS, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>", "<|im_end|>"),
        "pad": (PAD, "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
        "image": (IMAGE, "<|image|>", "<image>", "<|image_pad|>"),
        "noise": (NOISE,),
    }
    found: dict[str, Any] = {role: _first_id(tokenizer, spellings) for role, spellings in alternatives.items()}
    if found["eos"] is None:
        tried = ", ".join(alternatives["eos"])
        raise ValueError(f"data.tokenizer: no end-of-text token among {tried}; add one to the tokenizer's added_tokens")
    return SpecialIds(**found | {"pad": found["eos"] if found["pad"] is None else found["pad"]})


def identity(tokenizer: Tokenizer) -> str:
    """A hash of everything that determines how the tokenizer encodes."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()


def _first_id(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> int | None:
    ids = (tokenizer.token_to_id(spelling) for spelling in spellings)
    return next((i for i in ids if i is not None), None)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` entries: control tokens, 256 bytes, and merges.

    Raises ValueError if the texts are too short to learn that many merges from.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"data.vocab_size={vocab_size}: the training split has too little text, enough for only "
            f"{tokenizer.get_vocab_size()} entries; lower vocab_size or add text"
        )
    return tokenizer


def cached_tokenizer(texts: Iterator[str], texts_id: str, vocab_size: int, on_error: str, folder: Path) -> Tokenizer:
    """Train a tokenizer, or load it from `folder` if it has been trained before. The result is guarded.

    texts: read only if the tokenizer must be trained, and only the first TRAINING_BYTES. texts_id, on_error: determine
    which texts these are, so they are part of the file's name.
    """
    key = repr((VERSION, TRAINING_BYTES, texts_id, vocab_size, on_error, PIECES, CONTROL_TOKENS))
    path = folder / f"tokenizer-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"
    with locked(path):
        if not path.exists():
            log.info("training a tokenizer of %d entries into %s", vocab_size, path)
            tokenizer = train_tokenizer(_head(texts), vocab_size)
            with atomic_file(path) as temporary:
                tokenizer.save(str(temporary))
    return guard(Tokenizer.from_file(str(path)), str(path))


def _head(texts: Iterator[str]) -> Iterator[str]:
    """The first TRAINING_BYTES of the texts, rounded up to a whole text."""
    total = 0
    for text in texts:
        if total >= TRAINING_BYTES:
            return
        total += len(text.encode())
        yield text


def read_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a folder. The result is guarded. Raises `DataError` for anything else."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        remedy = "data.tokenizer must be `train`, a tokenizer.json or a folder that holds one"
        raise DataError(str(file), 0, "missing file", remedy)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(str(file), 0, "not a tokenizer", str(error).splitlines()[0]) from None
    return guard(tokenizer, str(file))


def guard(tokenizer: Tokenizer, file: str) -> Tokenizer:
    """A copy of the tokenizer that encodes the spelling of an added token as ordinary text.

    `encode_special_tokens` covers only tokens that are marked as special. Released tokenizers do not mark all of theirs
    (`<｜User｜>`, `<think>`), so every added token is marked here, except runs of white space, which are text. Raises
    `DataError` naming `file` if text can still produce a control token.
    """
    state = json.loads(tokenizer.to_str())
    control = [token for token in state["added_tokens"] if token["content"].strip()]
    for token in control:
        token["special"] = True
    state["truncation"] = state["padding"] = None  # documents are encoded whole, one by one
    safe = Tokenizer.from_str(json.dumps(state))
    safe.encode_special_tokens = True
    ids = {token["id"] for token in control}
    for token in control:
        leaked = ids.intersection(safe.encode(f"a {token['content']} b", add_special_tokens=False).ids)
        if leaked:
            detail = f"text that spells {token['content']} is encoded as that token; remove it from the merges"
            raise DataError(file, 0, "unsafe tokenizer", detail)
    return safe
