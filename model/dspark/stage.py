"""A stage of the drafter, its two heads, and the attention of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.backbone import Block, BlockState
from model.config import ForwardOptions, TextConfig
from model.dspark.layout import DraftLayout
from model.hyper import collapse_normed, expand
from model.kernels.switch import using
from model.moe import MoEFirstPass, Routing
from model.norm import RMSNorm
from model.parallel.ranks import Parallel
from model.sparse import chunk_elements, dense_attention, gathered_attention


class MarkovHead(nn.Module):
    """The Markov head: a low-rank bias on the logits that depends on the previous token, with the weights embed [V, r]
    and head [V, r].
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = nn.Linear(config.dspark_markov_rank, config.vocab_size, bias=False)

    def bias(self, embedded: Tensor) -> Tensor:
        """The bias fp32 [..., V] from the embedding [..., r] of the previous token."""
        with torch.autocast(embedded.device.type, enabled=False):
            return F.linear(embedded.float(), self.head.weight.float())


class ConfidenceHead(nn.Module):
    """The confidence head: predicts, as a logit, the probability that a draft is accepted."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.dspark_markov_rank, 1, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The confidence logits fp32 [...], from hidden [..., d] before the last norm and embedded [..., r], the Markov
        embedding of the previous token.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            both = torch.cat([hidden.float(), embedded.float()], dim=-1)
            return F.linear(both, self.proj.weight.float()).squeeze(-1)


class StageOutput(NamedTuple):
    """The output of a stage: the state after the stage, the routing of the stage, and the results that a recomputation
    of the stage reuses (None in the output of `recomputation.run`).
    """

    state: BlockState
    routing: Routing
    first_pass: MoEFirstPass | None


class Stage(Block):
    """A drafter stage: a block like those of the backbone that also attends to context keys. A stage has only
    sliding-window attention, and its number of experts can differ from the backbone's. The first stage also holds the
    projection and norm that compute `main_x`; the last stage holds the final norm, the Markov head and the confidence
    head.
    """

    def __init__(self, config: TextConfig, stage: int, parallel: Parallel):
        stages, layers = config.num_nextn_predict_layers, config.num_hidden_layers
        inner = replace(
            config,
            compress_ratios=(*config.compress_ratios[:layers], *[0] * stages),
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        super().__init__(inner, layers + stage, parallel)
        if stage == 0:
            width = len(config.dspark_target_layer_ids) * config.hidden_size
            self.main_proj = nn.Linear(width, config.hidden_size, bias=False)
            self.main_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if stage == stages - 1:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)

    def forward(  # type: ignore[override]
        self,
        state: BlockState,
        context_keys: Tensor,
        layout: DraftLayout,
        runtime: ForwardOptions,
        first: MoEFirstPass | None = None,
    ) -> StageOutput:
        """Run the stage on the state of N*B drafts. `layout.places` contains row numbers of context_keys [M, D]. With
        `runtime.attention="dense"`, the reference attention is used, for one block of drafts at a time. `first`: the
        results of the first forward pass, which are passed in recomputation only.
        """
        with using(runtime.kernels):
            streams = state.streams
            mix = self.hc_attn(streams)
            x = collapse_normed(streams, state.pre_mix, self.attn_norm)
            q, _ = self.attn.queries(x, layout.phasors)
            attend = attend_plainly if runtime.attention == "dense" else attend_in_chunks
            keys = self.attn.window_keys(x, layout.phasors)
            out = attend(q, keys, context_keys, layout, self.attn.attn_sink, self.attn.scale)
            streams = expand(streams, self.attn.project(out, layout.phasors), mix.post, mix.comb)
            pre_mix = mix.pre
            mix = self.hc_ffn(streams)
            y, routing = self.ffn(
                collapse_normed(streams, pre_mix, self.ffn_norm), layout, None, first, runtime.dispatch == "fp8"
            )
            state = BlockState(expand(streams, y, mix.post, mix.comb), mix.pre, state.shared)
        return StageOutput(state, routing, self.ffn.first_pass(routing, y, runtime.keep_combined))


def attend_in_chunks(
    q: Tensor, keys: Tensor, context: Tensor, layout: DraftLayout, sink: Tensor, scale: float
) -> Tensor:
    """Attention of drafts q [N*B, H, D] over their context keys and the keys [N*B, D] of their own block; returns [N*B,
    H, D].

    Context keys are gathered for a few blocks at a time, to bound memory, and gathered again in the backward pass.
    """
    blocks, window = layout.places.shape
    size, heads, dim = len(keys) // blocks, *q.shape[1:]
    step = max(1, chunk_elements(q.device) // (size * heads * (window + size) + (window + size) * dim))
    q, keys = q.view(blocks, size * heads, dim), keys.view(blocks, size, dim)
    sink, found = sink.repeat(size), []

    def attend(q: Tensor, keys: Tensor, places: Tensor, hidden: Tensor) -> Tensor:
        near = context.index_select(0, places.flatten()).view(*places.shape, dim)
        hidden = F.pad(hidden, (0, size))  # every draft sees all keys of its own block
        return gathered_attention(q, torch.cat([near, keys], dim=1), hidden, sink, scale)

    for at in range(0, blocks, step):
        part = slice(at, at + step)
        inputs = (q[part], keys[part], layout.places[part], layout.hidden[part])
        again = torch.is_grad_enabled() and step < blocks
        found.append(checkpoint(attend, *inputs, use_reentrant=False) if again else attend(*inputs))
    return torch.cat(found).view(-1, heads, dim)


def attend_plainly(q: Tensor, keys: Tensor, context: Tensor, layout: DraftLayout, sink: Tensor, scale: float) -> Tensor:
    """The reference for `attend_in_chunks`: it calls `dense_attention` for one block at a time, passing all keys that
    the block sees as `entries`.
    """
    found = []
    for places, hidden, own_q, own in zip(
        layout.places, layout.hidden, *(x.chunk(len(layout.places)) for x in (q, keys)), strict=True
    ):
        seen = torch.cat([context[places[~hidden]], own])
        every = torch.arange(len(seen), device=q.device).expand(len(own), -1)
        nothing = torch.full((len(own),), len(own), device=q.device)  # an empty window, which starts after the last key
        found.append(dense_attention(own_q, own, nothing, seen, every, sink, scale)[0])
    return torch.cat(found)
