"""Converts the batches of trainers to arguments of `DeepseekV41.forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batch_of(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    seq_lens: Tensor | None,
    vision_token_types: Tensor | None,
    others: dict[str, Any],
) -> dict[str, Any]:
    """Returns the arguments for `DeepseekV41.forward`. Raises ValueError if `others` contains an argument that this
    model does not support.
    """
    for name in ("inputs_embeds", "past_key_values", "cache", "output_router_logits", "shift_labels"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name}: is not supported; pass whole sequences as input_ids, and labels")
    if position_ids is not None and seq_lens is None:
        seq_lens = documents_of(position_ids, attention_mask)
    batch = dict(input_ids=input_ids, attention_mask=attention_mask, vision_token_types=vision_token_types)
    return batch if seq_lens is None else batch | dict(attention_mask=None, seq_lens=seq_lens)


def documents_of(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Returns the document lengths int64 [B, documents] that position_ids imply, or None if each row is one document.
    Raises ValueError if position_ids do not count every document from 0, or disagree with attention_mask.
    """
    if attention_mask is not None:
        expected = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        if bool(((position_ids != expected) & attention_mask.bool()).any()):
            raise ValueError("position_ids do not agree with attention_mask: they must count the real tokens from 0")
        return None
    starts = position_ids == 0
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    begun = torch.where(starts, index, 0).cummax(-1).values
    if not bool(starts[:, 0].all()) or bool((index - begun != position_ids).any()):
        raise ValueError("position_ids must count the tokens of every document from 0")
    end = torch.tensor([position_ids.shape[1]], device=position_ids.device)
    lengths = [row.nonzero().flatten().diff(append=end) for row in starts]
    return torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
