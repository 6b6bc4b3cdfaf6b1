"""Tokenizers: a byte-level BPE trained once on the train split, or any Hugging Face fast tokenizer.

Text is data. However a text spells a control token, it is encoded as ordinary text; control tokens enter a sequence by
their ids alone. `guard` sees to it, and every tokenizer that the project uses has passed through it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.cache import atomic_file, locked
from data.errors import DataError, log

# The released spellings; the ids of a trained tokenizer are their places in this tuple (released tokenizer).
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, USER, ASSISTANT, SYSTEM = "<｜deepseek_image｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
# The last one is kept for the drafter's noise token, so that training a drafter later leaves the vocabulary as it is.
NOISE = "<｜place▁holder▁no▁0｜>"
CONTROL_TOKENS = (BOS, EOS, PAD, IMAGE, USER, ASSISTANT, SYSTEM)
CONTROL_TOKENS += ("<think>", "</think>", "<tool_result>", "</tool_result>", NOISE)

# Words with one leading space, digits in groups of up to three (as the released tokenizer counts them), runs of symbols
# with the line end behind them, line ends with the blank lines before them, then indentation up to the last space.
PIECES = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TRAINING_BYTES = 2**28  # merges learned from more text than this do not differ in a way that matters
VERSION = 1  # raise when training changes, so that cached tokenizers are trained again


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control tokens the data needs. `bos`, `image`, `noise` are None where a foreign tokenizer has none."""

    bos: int | None
    eos: int
    pad: int
    image: int | None
    noise: int | None


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Ids of the control tokens of a tokenizer that `load_tokenizer` returned.

    A control token is found under its released spelling, or else under a spelling that is common for its role.
    Raises ValueError when no end-of-text token is found: documents could not be told apart.
    """
    alternatives = {
        "bos": (BOS, "<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>"),
        "eos": (EOS, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>", "<|im_end|>"),
        "pad": (PAD, "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
        "image": (IMAGE, "<|image|>", "<image>", "<|image_pad|>"),
        "noise": (NOISE,),
    }
    found = {role: _first_id(tokenizer, spellings) for role, spellings in alternatives.items()}
    if found["eos"] is None:
        tried = ", ".join(alternatives["eos"])
        raise ValueError(f"data.tokenizer: no end-of-text token among {tried}; add one to the tokenizer's added_tokens")
    return SpecialIds(**found | {"pad": found["eos"] if found["pad"] is None else found["pad"]})


def identity(tokenizer: Tokenizer) -> str:
    """A hash of everything that decides how the tokenizer encodes."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()


def _first_id(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> int | None:
    ids = (tokenizer.token_to_id(spelling) for spelling in spellings)
    return next((i for i in ids if i is not None), None)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries: control tokens, 256 bytes, merges learned from `texts`.

    Raises ValueError when the texts are too few to learn that many merges.
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
            f"data.vocab_size={vocab_size}: the train split has too little text, it yields {tokenizer.get_vocab_size()}"
            " entries; lower vocab_size or add text"
        )
    return tokenizer


def cached_tokenizer(texts: Iterator[str], texts_id: str, vocab_size: int, on_error: str, folder: Path) -> Tokenizer:
    """The guarded tokenizer of `train_tokenizer(texts, vocab_size)`, taken from `folder` if it was trained before.

    texts: looked at only where there is none yet, and no further than TRAINING_BYTES. texts_id, on_error: what decides
    which texts these are.
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
    """Texts up to TRAINING_BYTES; whole ones, so that no character is cut."""
    total = 0
    for text in texts:
        if total >= TRAINING_BYTES:
            return
        total += len(text.encode())
        yield text


def read_tokenizer(path: Path) -> Tokenizer:
    """The guarded tokenizer of a tokenizer.json, or of the folder that holds one. Raises `DataError`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        remedy = "data.tokenizer must be `train`, a tokenizer.json or a folder that holds one"
        raise DataError(str(file), 0, "missing file", remedy)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(str(file), 0, "no tokenizer", str(error).splitlines()[0]) from None
    return guard(tokenizer, str(file))


def guard(tokenizer: Tokenizer, file: str) -> Tokenizer:
    """Make every added token a control token that text cannot spell, then prove it. `file` is named where it fails.

    Tokenizers mark some of theirs (`<｜User｜>`, `<think>`) as ordinary added tokens, which `encode` would still match
    in text, so the mark is set for all of them; runs of white space, which some tokenizers add as tokens, stay text.
    """
    state = json.loads(tokenizer.to_str())
    control = [token for token in state["added_tokens"] if token["content"].strip()]
    for token in control:
        token["special"] = True
    state["truncation"] = state["padding"] = None  # a document is encoded whole and alone
    safe = Tokenizer.from_str(json.dumps(state))
    safe.encode_special_tokens = True
    ids = {token["id"] for token in control}
    for token in control:
        leaked = ids.intersection(safe.encode(f"a {token['content']} b", add_special_tokens=False).ids)
        if leaked:
            detail = f"text that spells {token['content']} is encoded as that token; remove it from the merges"
            raise DataError(file, 0, "unsafe tokenizer", detail)
    return safe
