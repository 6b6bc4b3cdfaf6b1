"""Decoding token by token for `DeepseekV41ForCausalLM.generate`, with the packed cache."""

from __future__ import annotations

import torch
from torch import Tensor

from model.backbone import DeepseekV41
from model.cache.pages import Cache
from model.cache.step import Step

PREFILL_TOKENS = 4096  # number of prompt tokens in one forward pass


class Decoding:
    """The packed cache of one `generate` call, and the token ids of each cached sequence.

    If earlier tokens of a sequence have changed since the last call (because beam search replaced the sequence), the
    cache is rebuilt.
    """

    def __init__(self, model: DeepseekV41):
        self.model = model
        self.seen: list[list[int]] = []
        self.cache: Cache | None = None
        self.rows: list[int] = []

    @torch.no_grad()
    def next_logits(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Returns the logits fp32 [B, 1, V] of the token that follows each row of input_ids [B, S]. Raises ValueError
        for a token id outside the vocabulary and for a row with only padding.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        wanted = [ids[real.bool()].tolist() for ids, real in zip(input_ids, mask, strict=True)]
        size = self.model.config.text.vocab_size
        for row, ids in enumerate(wanted):
            known = len(self.seen[row]) if row < len(self.seen) else 0
            if wrong := [token for token in ids[known:] if not 0 <= token < size]:
                raise ValueError(f"input_ids row {row} holds {wrong[0]}: allowed are 0..{size - 1}")
        if not all(wanted):
            raise ValueError(
                f"attention_mask row {wanted.index([])} has only padding; it needs at least one token, such as BOS"
            )
        pairs = list(zip(wanted, self.seen, strict=False))
        if len(pairs) < len(wanted) or any(ids[: len(old)] != old or len(ids) == len(old) for ids, old in pairs):
            self.cache = Cache(self.model.config.text, self.model.runtime.kv_quant, device=input_ids.device)
            self.rows = [self.cache.open() for _ in wanted]
            self.seen = [[] for _ in wanted]
        hidden = self._advance([ids[len(old) :] for ids, old in zip(wanted, self.seen, strict=True)])
        self.seen = wanted
        return self.model.head(hidden).unsqueeze(1)

    def _advance(self, new: list[list[int]]) -> Tensor:
        """Run the model on the new tokens of every row; `new` contains the token ids of each row. Returns the hidden
        state [B, d] of each row's last token.
        """
        share = max(1, PREFILL_TOKENS // len(new))
        last: dict[int, Tensor] = {}
        for start in range(0, max(map(len, new)), share):
            parts = [(i, tokens[start : start + share]) for i, tokens in enumerate(new)]
            parts = [(i, tokens) for i, tokens in parts if tokens]
            hidden = self._pass(Step.after(self.cache, [self.rows[i] for i, _ in parts], [t for _, t in parts]))
            last |= {i: state for (i, _), state in zip(parts, hidden, strict=True)}
        return torch.stack([last[i] for i in range(len(new))])

    def _pass(self, step: Step) -> Tensor:
        """Run all layers on one step. Returns the hidden state [B, d] of every row's last token."""
        model = self.model
        layers = range(model.config.text.num_hidden_layers)
        state = model.init_streams(model.embed(step.ids))
        lookups = model.look_up(layers, step.ids, step.layout, step)
        for layer in layers:
            state = model.run_block(layer, state, lookups, step.layout, step=step).state
        step.commit()
        return model.final_hidden(state).index_select(0, step.on_device(step.start + step.host_count - 1))
