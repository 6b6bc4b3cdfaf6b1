"""Writes the files that other programs expect beside a tokenizer.json: the roles of its tokens, and the chat
template.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, processors

from data.chat.render import REQUIRED_TOKENS
from data.config import DataConfig
from data.tokenizer import special_ids

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def tokenizer_files(cfg: DataConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """The texts, by file name, of the files that make `AutoTokenizer` and engines based on it use a tokenizer as this
    project does: BOS comes first, control tokens have their roles, and the chat template renders the V4.1 chat format.

    If the tokenizer was loaded from a folder that has such files, the files of that folder are returned unchanged.
    There is no chat template if the tokenizer lacks tokens of the chat format.
    """
    folder = Path(cfg.tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    if cfg.tokenizer != "train" and (folder / CONFIG).is_file():
        names = (CONFIG, TEMPLATE, "special_tokens_map.json")
        return {name: (folder / name).read_text(encoding="utf-8") for name in names if (folder / name).is_file()}
    ids = special_ids(tokenizer)
    roles = {"bos_token": ids.bos, "eos_token": ids.eos, "pad_token": ids.pad}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokenizer.id_to_token(number) for role, number in roles.items() if number is not None},
        "clean_up_tokenization_spaces": False,
    }
    files = {TOKENIZER: _with_bos(tokenizer, ids.bos), CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    if all(tokenizer.token_to_id(token) is not None for token in REQUIRED_TOKENS):
        files[TEMPLATE] = (Path(__file__).parent / "chat" / TEMPLATE).read_text(encoding="utf-8")
    return files


def _with_bos(tokenizer: Tokenizer, bos: int | None) -> str:
    """The text of tokenizer.json. If the tokenizer adds no special tokens, the written tokenizer adds BOS to a text."""
    written = Tokenizer.from_str(tokenizer.to_str())
    if bos is not None and written.post_processor is None:
        token = tokenizer.id_to_token(bos)
        written.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, bos)]
        )
    return written.to_str(pretty=True)
