"""Records of conversations for tests, and the format's spellings, written out once more."""

import io

from PIL import Image

from data.chat.read import read_conversation
from data.chat.render import documents
from data.errors import BadRecordPolicy
from data.tokenizer import CONTROL_TOKENS
from data.tokens import Encoder

EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, reasoning=None, **more):
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {}), **more}


def call(id, arguments, name="weather"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


def picture(color=(200, 10, 10), size=(24, 16)):
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, "PNG")
    return data.getvalue()


def encode(tokenizer, record, policy=None, vision=None, seq_len=2000):
    """The documents of a record, each as (ids, loss mask)."""
    found = list(documents(read_conversation(record, "f.jsonl", 1), "f.jsonl", 1))
    encoder = Encoder(tokenizer, seq_len, vision, count_bytes=True, conversations=True)
    return [(e.ids.tolist(), e.loss_mask.tolist()) for e in encoder.encode(found, policy or BadRecordPolicy("stop"))]


def expected(tokenizer, *parts):
    """Ids and mask written by hand: a control token or text is not supervised, one in a list is."""
    ids, mask = [], []
    for part in parts:
        text = part[0] if isinstance(part, list) else part
        new = [tokenizer.token_to_id(text)] if text in CONTROL_TOKENS else tokenizer.encode(text).ids
        ids += new
        mask += [isinstance(part, list)] * len(new)
    return ids, mask
