"""Loads a Hugging Face fast tokenizer, or trains a byte-level BPE tokenizer on the training split.

Text that spells a control token is encoded as ordinary text, and control tokens enter a sequence only by their ids. The
function `guard` ensures this, and is applied to every tokenizer of this project.
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

from data.cache import atomic_file, make_once
from data.errors import DataError
from data.progress import Advance, progress

log = logging.getLogger(__name__)

# The spellings in the released tokenizer. In a tokenizer trained here, the ids follow the order of CONTROL_TOKENS, as
# in the released one.
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, USER, ASSISTANT, SYSTEM = "<｜deepseek_image｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
# The drafter's token is reserved in advance, so that training a drafter later does not change the vocabulary.
NOISE = "<｜place▁holder▁no▁0｜>"
THINKING, TOOLS = ("<think>", "</think>"), ("<tool_result>", "</tool_result>")
CONTROL_TOKENS = (BOS, EOS, PAD, IMAGE, USER, ASSISTANT, SYSTEM, *THINKING, *TOOLS, NOISE)

# Words with one leading space, groups of up to three digits (as in the released tokenizer), runs of symbols with the
# line end after them, line ends with the blank lines before them, then indentation up to the last space.
PIECES = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TRAINING_BYTES = 2**28  # bytes of text to train on; more text hardly changes the merges
VERSION = 1  # raise it when training changes, so that cached tokenizers are trained again


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the control tokens that the data pipeline needs. `bos`, `image` and `noise` are None if the tokenizer
    lacks these tokens.
    """

    bos: int | None
    eos: int
    pad: int
    image: int | None
    noise: int | None


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The ids of a tokenizer's control tokens, found by their released spellings or by other common spellings for the
    same roles.

    If the tokenizer has no padding token, EOS is used for padding. Raises ValueError if there is no end-of-text token,
    because it separates documents.
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
        raise ValueError(
            f"data.tokenizer: the tokenizer has no end-of-text token ({tried}); add one to its added_tokens"
        )
    return SpecialIds(**found | {"pad": found["eos"] if found["pad"] is None else found["pad"]})


def identity(tokenizer: Tokenizer) -> str:
    """A hash of everything that determines how the tokenizer encodes text."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()


def _first_id(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> int | None:
    ids = (tokenizer.token_to_id(spelling) for spelling in spellings)
    return next((i for i in ids if i is not None), None)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with exactly `vocab_size` tokens: control tokens, 256 byte values, and merges.

    Raises ValueError if the texts are too short to learn that many merges.
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
            f"data.vocab_size={vocab_size}: the training split has too little text; it gives only "
            f"{tokenizer.get_vocab_size()} tokens; lower vocab_size or add text"
        )
    return tokenizer


def cached_tokenizer(
    texts: Iterator[str], texts_id: str, vocab_size: int, on_error: str, folder: Path, num_bytes: int = TRAINING_BYTES
) -> Tokenizer:
    """Train a tokenizer, or load it from `folder` if it has been trained before. `guard` has been applied to the
    result.

    texts: are read only if the tokenizer must be trained, and only their first TRAINING_BYTES bytes. texts_id,
    on_error: identify the texts, so both are part of the name of the cached file. num_bytes: the size of the texts, for
    the progress that is shown while they are read.
    """
    key = repr((VERSION, TRAINING_BYTES, texts_id, vocab_size, on_error, PIECES, CONTROL_TOKENS))
    path = folder / f"tokenizer-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"

    def write() -> None:
        log.info("training a tokenizer with %d tokens; it will be cached in %s", vocab_size, path)
        with progress("reading text for the tokenizer", min(num_bytes, TRAINING_BYTES)) as advance:
            tokenizer = train_tokenizer(_head(texts, advance), vocab_size)
        with atomic_file(path) as temporary:
            tokenizer.save(str(temporary))

    make_once(path, write)
    return guard(Tokenizer.from_file(str(path)), str(path))


def _head(texts: Iterator[str], advance: Advance) -> Iterator[str]:
    """The first texts, until they have at least TRAINING_BYTES bytes in total."""
    total = 0
    for text in texts:
        if total >= TRAINING_BYTES:
            return
        size = len(text.encode())
        total += size
        yield text
        advance(size)


def read_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json file, given by its own path or by that of its folder. `guard` has been applied to the
    result. Raises `DataError` if there is no valid tokenizer.json.
    """
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

    The library's option `encode_special_tokens` works only for tokens that are marked as special. Released tokenizers
    do not mark all their control tokens (for example not `<think>`), so this function marks every added token except
    runs of white space, which are text. Raises `DataError` with the name `file` if text can still produce a control
    token.
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
