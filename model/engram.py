"""Engram: a memory indexed by hashed n-grams, whose values are added to all residual streams before the attention of a
block.

Token ids are first compressed: tokens whose normalised text is the same share an id. The n-grams of compressed ids that
end at a token are hashed to rows of tables of prime size. The rows are projected to n keys and one value, and the
value, weighted by a gate computed from the keys, is added to each of the n residual streams. In shapes, T is the number
of tokens, n the number of residual streams, d the hidden size, and G = (max_ngram - 1) * heads the number of table rows
per token and layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn

from model.config import TextConfig
from model.kernels.switch import in_triton
from model.layout import SequenceLayout
from model.no_wait import Constant
from model.parallel.ranks import RankGroup
from model.parallel.tables import Lookup, Table
from model.quantize import FP8_ROWS
from model.rounding import Linear, Rounds


@dataclass(frozen=True)
class EngramTables:
    """The hash constants of all Engram layers: multipliers [layers][orders+1], primes and offsets [layers][G], and the
    number of table rows [layers].
    """

    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


def engram_tables(config: TextConfig) -> EngramTables:
    """The hash constants that follow from a configuration. Raises ValueError if a table in `engram_num_embeddings` has
    fewer rows than the hashes need.
    """
    tables = _tables(
        config.engram_layer_ids,
        config.engram_max_ngram_size,
        config.engram_n_heads,
        config.engram_vocab_size,
        config.engram_compressed_vocab_size,
    )
    given = config.engram_num_embeddings
    if any(have < need for have, need in zip(given, tables.rows, strict=False)):
        raise ValueError(
            f"text_config.engram_num_embeddings: is {list(given)}, but engram_vocab_size, engram_n_heads and "
            f"engram_max_ngram_size need {list(tables.rows)} rows; correct the value or leave it empty"
        )
    return tables


@lru_cache(maxsize=8)
def _tables(layer_ids: tuple[int, ...], orders: int, heads: int, vocab: int, compressed_vocab: int) -> EngramTables:
    from sympy import nextprime  # imported here because it takes almost a second and only Engram needs it

    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    used: set[int] = set()
    multipliers, primes, offsets, rows = [], [], [], []
    for layer in layer_ids:
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=orders, dtype=np.int64)
        multipliers.append(tuple(int(m) * 2 + 1 for m in drawn))
        sizes: list[int] = []
        for _ in range(orders - 1):
            candidate = vocab - 1
            for _ in range(heads):
                candidate = nextprime(candidate)
                while candidate in used:
                    candidate = nextprime(candidate)
                used.add(candidate)
                sizes.append(candidate)
        primes.append(tuple(sizes))
        offsets.append(tuple(sum(sizes[:i]) for i in range(len(sizes))))
        rows.append(sum(sizes))
    return EngramTables(tuple(multipliers), tuple(primes), tuple(offsets), tuple(rows))


def build_token_map(tokenizer: Tokenizer) -> Tensor:
    """The compressed id of every token id, int64 [len(tokenizer)], numbered in the order of first appearance.

    Two tokens share a compressed id if their decoded texts are equal after normalisation: NFKC, NFD, removal of
    accents, lowercasing, replacement of runs of space, tab, CR and LF by one space, and stripping (a text that is only
    a space stays). Tokens that cannot be decoded on their own are compared by their raw spelling, and tokens whose
    normalised text is empty by their decoded text.
    """
    ids: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    normalizer = _text_normalizer()
    keys = (_compression_key(tokenizer, normalizer, token) for token in range(size))
    return torch.tensor([ids.setdefault(key, len(ids)) for key in keys], dtype=torch.int64)


def _text_normalizer() -> normalizers.Normalizer:
    lone_space = "\ue000"  # a private-use character that replaces a lone space, which stripping would remove
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), lone_space),
            normalizers.Strip(),
            normalizers.Replace(lone_space, " "),
        ]
    )


def _compression_key(tokenizer: Tokenizer, normalizer: normalizers.Normalizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token) or ""
    return normalizer.normalize_str(text) or text


def hash_ids(
    tables: EngramTables,
    layer: int,
    token_map: Tensor,
    pad_token_id: int,
    tokens: Tensor,
    document_start: Tensor,
    masked: Tensor | None,
) -> Tensor:
    """The table rows int64 [T, G] that each token reads in one Engram layer; `layer` is the index among the Engram
    layers.

    tokens int64 [b + T] and masked bool [b + T] (image positions) begin with b earlier tokens, for which no rows are
    computed; document_start int64 [T] is relative to the first of the T tokens. If an n-gram reaches beyond the start
    of the document or to a masked position, this position and all positions before it count as pad tokens. int64
    arithmetic wraps around.
    """
    before = tokens.shape[0] - document_start.shape[0]
    index = torch.arange(document_start.shape[0], device=tokens.device)
    compressed = token_map[tokens]
    pad = token_map[pad_token_id]
    reachable = torch.ones_like(index, dtype=torch.bool)
    multipliers = tables.multipliers[layer]
    primes, offsets = (c.on_device_of(tokens) for c in _constants(tables.primes[layer], tables.offsets[layer]))
    heads = len(primes) // (len(multipliers) - 1)
    rolling = torch.zeros_like(index)
    found = []
    for back, multiplier in enumerate(multipliers):
        at = index - back
        reachable = reachable & (at >= document_start)
        at = (at + before).clamp(min=0)
        if masked is not None:
            reachable = reachable & ~masked[at]
        rolling = rolling ^ (torch.where(reachable, compressed[at], pad) * multiplier)
        if back == 0:
            continue
        head = slice((back - 1) * heads, back * heads)
        found.append(torch.remainder(rolling[:, None], primes[head]))
    return torch.cat(found, dim=1) + offsets


@lru_cache(maxsize=64)
def _constants(primes: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Constant, Constant]:
    return Constant(primes, torch.int64), Constant(offsets, torch.int64)


class Engram(nn.Module, Rounds):
    """One Engram layer: a table, a projection to n keys and one value, and a gate for each residual stream."""

    packing, option = FP8_ROWS, "engram_quant"

    def __init__(self, config: TextConfig, layer: int, ranks: RankGroup):
        super().__init__()
        n, d = config.hc_mult, config.hidden_size
        self.n, self.eps = n, config.rms_norm_eps
        self.number = config.engram_layer_ids.index(layer)
        self.tables = engram_tables(config)
        # Checkpoint files may have a few more rows than needed
        rows = (config.engram_num_embeddings or self.tables.rows)[self.number]
        self.embed = Table(rows, config.engram_head_dim, ranks)
        self.wkv = Linear(config.engram_hash_heads * config.engram_head_dim, (n + 1) * d, bias=False)
        self.q_weight = nn.Parameter(torch.empty(n, d))
        self.k_weight = nn.Parameter(torch.empty(n, d))

    def forward(self, streams: Tensor, lookup: Lookup, layout: SequenceLayout) -> Tensor:
        """Add the gated value to the residual streams [T, n, d], given the looked-up table rows `lookup`; returns the
        new streams.
        """
        memory = self.wkv(self.rounded(lookup.rows()).flatten(1)).unflatten(-1, (self.n + 1, -1))
        weight = (self.q_weight * self.k_weight).float()
        if in_triton(streams):
            from model.kernels import engram as kernels

            return kernels.add_gated(streams, memory, weight, layout.image, self.eps)
        key, value = memory[:, : self.n].float(), memory[:, self.n].float()
        x = streams.float()
        dot = (x * weight * key).sum(-1) * x.shape[-1] ** -0.5
        s = dot * torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        gate = torch.sigmoid(s.sign() * s.abs().clamp(min=1e-6).sqrt())
        if layout.image is not None:
            gate = gate * ~layout.image[:, None]
        return streams + (gate[:, :, None] * value[:, None, :]).to(streams.dtype)


def engram_rows(config: TextConfig, layer: int, token_map: Tensor, input_ids: Tensor, layout: SequenceLayout) -> Tensor:
    """The table rows that the tokens of the layout read in the Engram of backbone layer `layer`. input_ids int64 [b +
    T] begins with b earlier tokens (see `flatten_with_lookback`).
    """
    number = config.engram_layer_ids.index(layer)
    return hash_ids(
        engram_tables(config),
        number,
        token_map,
        config.engram_pad_token_id,
        input_ids,
        layout.document_start,
        layout.image_with_lookback(),
    )


def whole_token_map(config: TextConfig, token_map: Tensor) -> Tensor:
    """The token map, extended to int64 [vocab_size]: token ids that the tokenizer lacks get the compressed id of the
    pad token.

    The vocabulary of a model is padded to a round size. The extra ids have no text, but a model with random weights can
    generate them.
    """
    missing = config.vocab_size - len(token_map)
    return token_map if missing <= 0 else torch.cat([token_map, token_map[config.engram_pad_token_id].expand(missing)])


def check_token_map(config: TextConfig, token_map: Tensor | None) -> None:
    """Raise ValueError if the model has Engram layers and the token map is missing or does not fit the
    configuration.
    """
    if not config.engram_layer_ids:
        return
    if token_map is None:
        raise ValueError(
            "a model with Engram layers needs a token map; make one by model.engram.build_token_map(tokenizer)"
        )
    if token_map.dtype != torch.int64 or token_map.dim() != 1:
        raise ValueError(f"the Engram token map must be int64 [tokens], got {token_map.dtype} {list(token_map.shape)}")
    compressed = int(token_map.max()) + 1
    if compressed > config.engram_compressed_vocab_size:
        raise ValueError(
            f"text_config.engram_compressed_vocab_size: is {config.engram_compressed_vocab_size}, but the "
            f"tokenizer has {compressed} distinct compressed tokens"
        )
