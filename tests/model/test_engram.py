"""Engram: token compression, hash constants and hashes bit for bit, document borders, images, the gate."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from golden_files import golden
from safetensors.torch import load_file
from tiny import pack_of, tiny_config, tiny_model, tokens
from tokenizers import Tokenizer

from model import build_model
from model.config import TextConfig
from model.engram import build_token_map, check_token_map, engram_rows, engram_tables, hash_ids
from model.generation import Request, generate


def rows_by_batch(tables, layer, token_map, ids, starts, masked) -> torch.Tensor:
    """hash_ids of each row of [B, S]."""
    return torch.stack([hash_ids(tables, layer, token_map, 2, *row) for row in zip(ids, starts, masked, strict=True)])


def test_golden_hashes() -> None:
    folder = golden("engram_hash")
    data = load_file(folder / "hash.safetensors")
    keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))  # text keys only, not a whole config
    tables = engram_tables(TextConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()}))
    for name in ("multipliers", "primes", "offsets"):
        assert torch.equal(torch.tensor(getattr(tables, name)), data[name]), name
    token_map = build_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert torch.equal(token_map, data["token_map"])
    ids, start = data["input_ids"], torch.zeros_like(data["input_ids"])
    text = data["token_mask"]
    assert 0 < text.sum() < text.numel()
    for number in (0, 1):
        plain = rows_by_batch(tables, number, token_map, ids, start, [None, None])
        assert torch.equal(plain, data["hashes_unmasked"][:, :, number])
        masked = rows_by_batch(tables, number, token_map, ids, start, ~text)
        assert torch.equal(masked, data["hashes"][:, :, number])


DETAIL = {
    "production_constants_identity_map": {},
    "tiny_tokenizer_prod_buckets": {"engram_compressed_vocab_size": 248},
    "tiny_tokenizer_tiny_buckets": {
        "engram_layer_ids": (1, 4),
        "engram_compressed_vocab_size": 248,
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_vocab_size": 97,
    },
}


@pytest.mark.parametrize("name", DETAIL)
def test_golden_hashes_with_documents_and_masks(name: str) -> None:
    """`production_constants...`: the released multipliers, primes and table sizes."""
    data = load_file(golden("detail/engram_hash") / f"{name}.safetensors")
    config = TextConfig(engram_num_embeddings=(), **DETAIL[name])
    tables = engram_tables(config)
    for constant in ("multipliers", "primes", "offsets"):
        assert torch.equal(torch.tensor(getattr(tables, constant)), data[constant]), constant
    token_map = data.get("token_map", torch.arange(config.engram_compressed_vocab_size))
    assert token_map[2] == data["pad_compressed_id"]
    ids, documents, text = data["input_ids"], data["sequence_ids"], data["token_mask"].bool()
    index = torch.arange(ids.shape[1]).expand_as(ids)
    begins = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), documents.diff() != 0], dim=1)
    starts = torch.where(begins, index, 0).cummax(1).values
    for number in (0, 1):
        for kind in ("plain", "docs", "masked", "masked_docs"):
            first = starts if "docs" in kind else torch.zeros_like(ids)
            masked = ~text if "masked" in kind else [None, None]
            ours = rows_by_batch(tables, number, token_map, ids, first, masked)
            real = documents > 0  # the rest is padding, which has no rows here
            assert torch.equal(ours[real], data[f"hash_ids.{kind}"][:, :, number][real]), kind


def test_released_row_counts() -> None:
    assert engram_tables(TextConfig()).rows == TextConfig().engram_num_embeddings == (384006168, 384016682)


def test_token_map_of_another_tokenizer() -> None:
    folder = golden("detail/engram_hash")
    token_map = build_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    listed = json.loads((folder / "tokenizer_decode.json").read_text(encoding="utf-8"))
    assert token_map.tolist() == [token["compressed"] for token in listed]
    assert int(token_map.max()) + 1 < len(listed), "some spellings share an id"


def test_tables_too_small_for_their_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="engram_num_embeddings.*need"):
        engram_tables(tiny_config(engram=True, engram_num_embeddings=[10, 1000]).text)


def test_look_back_stops_at_the_document() -> None:
    """Rows of a document do not depend on the document before it; rows inside one depend on 3 tokens back."""
    config = tiny_config(engram=True)
    token_map = torch.arange(61) % 50
    layout = pack_of(config, [7, 9])
    ids = tokens(16)
    rows = engram_rows(config.text, 1, token_map, ids, layout)
    other = ids.clone()
    other[6] = (ids[6] + 1 - 4) % 40 + 4
    changed = (engram_rows(config.text, 1, token_map, other, layout) != rows).any(-1)
    assert changed.tolist() == [False] * 6 + [True] + [False] * 9
    other = ids.clone()
    other[8] = (ids[8] + 1 - 4) % 40 + 4
    changed = (engram_rows(config.text, 1, token_map, other, layout) != rows).any(-1)
    assert changed.nonzero().flatten().tolist() == [8, 9, 10, 11]
    alone = engram_rows(config.text, 1, token_map, ids[7:], pack_of(config, [9]))
    assert torch.equal(alone, rows[7:])


def test_layer_against_a_plain_loop_and_no_gate_on_images() -> None:
    """Report, Engram: a gate per stream from the normalised, weighted dot product of stream and key."""
    built = tiny_model(engram=True)
    layer, config = built.layers[1].engram, built.config.text
    layout = dataclasses.replace(pack_of(built.config, [9]), image=torch.arange(9).ge(3) & torch.arange(9).lt(6))
    rows = engram_rows(config, 1, built.token_map, tokens(9), layout)
    assert rows.shape == (9, 6) and rows.max() < layer.embed.num_embeddings
    streams = torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(0))
    out = layer(streams, layer.embed.look_up(rows), layout)
    assert torch.equal(out[3:6], streams[3:6])
    for t in (0, 1, 2, 6, 7, 8):
        memory = layer.wkv.weight @ torch.cat([layer.embed.weight[row] for row in rows[t]])
        *keys, value = memory.split(32)
        for i in range(4):
            x, key = streams[t, i], keys[i]
            s = (x * layer.q_weight[i] * layer.k_weight[i] * key).sum() * 32**-0.5
            s = s / x.square().mean().sqrt() / key.square().mean().sqrt()
            gate = torch.sigmoid(s.sign() * s.abs().sqrt())
            torch.testing.assert_close(out[t, i], x + gate * value, atol=1e-5, rtol=1e-5)


def test_token_map_is_checked_before_the_model_is_made() -> None:
    config = tiny_config(engram=True)
    with pytest.raises(ValueError, match="build_token_map"):
        build_model(config)
    with pytest.raises(ValueError, match="int64"):
        check_token_map(config.text, torch.zeros(61))
    with pytest.raises(ValueError, match="engram_compressed_vocab_size.*61"):
        check_token_map(config.text, torch.arange(61))


def test_ids_that_the_tokenizer_does_not_have_count_as_padding() -> None:
    """NeMo-RL 237: a vocabulary padded beyond its tokenizer; a model of random weights draws such ids."""
    config = tiny_config(engram=True)
    token_map = torch.arange(50)
    built = build_model(config, token_map=token_map)
    assert torch.equal(built.token_map[:50], token_map) and len(built.token_map) == config.text.vocab_size == 61
    assert (built.token_map[50:] == token_map[config.text.engram_pad_token_id]).all()
    assert built(torch.tensor([[5, 55, 60]])).logits.isfinite().all()
    (sample,) = generate(built, [Request((5, 60), 8, temperature=1.0, seed=3)])
    assert len(sample.tokens) == 8


@pytest.mark.parametrize("wrong", [61, 10**9, -1])
def test_an_id_outside_of_the_vocabulary_is_refused_by_value_and_place(wrong: int) -> None:
    built = tiny_model(engram=True)
    ids = torch.tensor([[5, 6, 7], [8, 9, wrong]])
    with pytest.raises(ValueError, match=rf"input_ids\[1, 2\] = {wrong} is outside the vocabulary; allowed are 0..60"):
        built(ids)
    with pytest.raises(ValueError, match=rf"input_ids\[1, 2\] = {wrong} "):
        built.losses(ids, ids.clamp(0, 60), built.loss_denominators(ids, ids.clamp(0, 60)))
    with pytest.raises(ValueError, match=rf"prompt: contains {wrong}"):
        generate(built, [Request((5, wrong), 2)])
    padded = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert built(ids, attention_mask=padded).logits.isfinite().all(), "what stands at padding does not matter"
