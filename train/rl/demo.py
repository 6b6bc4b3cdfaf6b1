"""Creates what `make rl-demo` starts from: conversations with reasoning, a tokenizer, and an untrained model.

    python -m train.rl.demo FOLDER

The task (``rewards/builtin.py``: ``highest``) is to name the highest of twelve digits. The reasoning in the
conversations looks like this:

    052g:a3b3c4d4e4f9g9       effort 52; read as far as g; the highest digit up to a, up to b, ...

The answer is the highest digit that was read. How many digits the reasoning reads is mostly random and depends a little
on the effort. The effort is drawn from 1 to 100; named efforts are more likely. An answer after two digits is usually
wrong, and an answer after all twelve is right. A model fine-tuned on these conversations can reason both briefly and
thoroughly, and reasons slightly longer at a higher effort. Reinforcement learning then teaches it how long to reason at
each effort.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.chat.conversation import EFFORT_LINE, EFFORTS
from data.tokenizer import CONTROL_TOKENS
from model import ModelConfig, build_model, save_pretrained
from train.build import fit_to_tokenizer
from train.config.compose import CONF_DIR
from train.rl.rewards.builtin import highest

CONVERSATIONS = 15_000
LEANING = 0.7  # how much the share of digits read depends on the effort; the rest is random
NAMED = 0.3  # share of the conversations with a named effort; the others have a random number


def conversation(draw: random.Random) -> dict[str, Any]:
    """Draw a conversation about the task: a prompt with an effort, its reasoning and its answer."""
    record = highest(draw)
    effort = draw.choice(list(EFFORTS.values())) if draw.random() < NAMED else draw.randint(1, 100)
    items = [record["prompt"][at : at + 2] for at in range(0, len(record["prompt"]), 2)]
    items = [item for item in items if item[0] in string.ascii_lowercase]
    share = draw.uniform(0, 1) + LEANING * (effort - 50.5) / 100
    count = min(len(items), max(1, round(1 + (len(items) - 1) * share)))
    seen = [int(digit) for _, digit in items[:count]]
    steps = [letter + str(max(seen[: n + 1])) for n, (letter, _) in enumerate(items[:count])]
    answer = {"role": "assistant", "content": str(max(seen))}
    answer["reasoning_content"] = f"{effort:03d}{items[count - 1][0]}:{''.join(steps)}"
    return {"messages": [{"role": "user", "content": record["prompt"]}, answer], "effort": effort, "thinking": True}


def make_tokenizer() -> Tokenizer:
    """Make a byte-level tokenizer in which the words of the effort line in the system prompt are single tokens.

    Each digit is a token of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # more than the effort line needs
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([EFFORT_LINE.format(effort) for effort in range(1, 101)], trainer)
    return tokenizer


def prepare(folder: Path) -> None:
    """Write the conversations ``chats.jsonl`` and the untrained checkpoint ``base`` into ``folder``, if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = folder / "chats.jsonl"
    if not chats.exists():
        draw = random.Random("conversations")
        lines = [json.dumps(conversation(draw)) + "\n" for _ in range(CONVERSATIONS)]
        chats.write_text("".join(lines), encoding="utf-8")
        print(f"{chats}: {CONVERSATIONS:,} conversations; the first one is {lines[0]}", end="")
    if not (folder / "base").exists():
        tokenizer = make_tokenizer()
        raw = yaml.safe_load((CONF_DIR / "model" / "rl_demo.yaml").read_text(encoding="utf-8"))
        config, token_map, _ = fit_to_tokenizer(ModelConfig.from_dict(raw), tokenizer)
        model = build_model(config, token_map=token_map, seed=0)
        save_pretrained(model, folder / "base", tokenizer)
        print(f"{folder / 'base'}: {sum(p.numel() for p in model.parameters()):,} parameters, untrained")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
