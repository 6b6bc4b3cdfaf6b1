"""The packed cache: what a token costs, and that what it gives back is what was put in."""

from __future__ import annotations

import pytest
import torch
from golden_files import load_oracle
from tiny import tiny_config

from model import DeepseekV41, ForwardOptions, TextConfig, load_pretrained
from model.cache.pages import Cache
from model.cache.step import LayerCache, Step
from model.count import kv_bytes, window_kv_bytes
from model.quantize import fake_quant_fp4, fake_quant_fp8, fake_quant_mxfp4


def fill(cache: Cache, lengths: list[int], pieces: int = 1) -> dict[int, list[torch.Tensor]]:
    """Random state for new sequences, written in pieces; by kv source [main KV, index keys] of all their entries."""
    config, generator = cache.config, torch.Generator().manual_seed(0)
    rows = [cache.open() for _ in lengths]
    written: dict[int, list[torch.Tensor]] = {}
    for piece in range(pieces):
        parts = [[0] * ((piece + 1) * n // pieces - piece * n // pieces) for n in lengths]
        step = Step.after(cache, rows, parts)
        for layer in config.kv_source_layer_ids:
            count = len(step.layout.entries[config.ratio(layer)].members)
            kv = torch.randn(count, config.head_dim, generator=generator)
            keys = fake_quant_mxfp4(torch.randn(count, config.index_head_dim, generator=generator))
            written.setdefault(layer, []).append((kv, keys, LayerCache(step, layer).entries(kv, keys)))
        step.commit()
    return written


def test_890_bytes_a_token() -> None:
    """Main KV and index keys of the released model, by the storage of the tensors; a page holds nothing else."""
    cache = Cache(TextConfig())
    fill(cache, [640] * 3)
    in_use = sum(use > 0 for use in cache.uses)
    assert in_use * cache.page_tokens == 3 * 640
    assert cache.entry_bytes() == 890 * cache.pages * cache.page_tokens
    assert cache.entry_bytes() / cache.pages * in_use == 890 * 3 * 640
    assert sum(kv_bytes(TextConfig()).values()) == 890
    assert {t.dtype for s in cache.main.values() for t in s.tensors} == {torch.uint8, torch.float8_e4m3fn}
    assert {t.dtype for s in cache.index.values() for t in s.tensors} == {torch.uint8, torch.float8_e8m0fnu}


def test_bytes_of_odd_lengths_and_without_qat() -> None:
    """A sequence wastes less than a page; without QAT main KV is as wide as the model's dtype."""
    config = tiny_config().text
    page = Cache(config).page_tokens
    per_token = sum(kv_bytes(config).values())
    for length in (1, page - 1, page, page + 1, 10 * page + 3):
        cache = Cache(config)
        fill(cache, [length])
        used = cache.entry_bytes() / cache.pages * sum(use > 0 for use in cache.uses)
        assert length * per_token <= used < (length + page) * per_token
    plain = Cache(TextConfig(), kv_quant=False)
    fill(plain, [64])
    assert plain.entry_bytes() == (3 / 2 + 1) * (4 * 512 + 68) * plain.pages * plain.page_tokens


def test_window_bytes() -> None:
    config = tiny_config().text
    cache = Cache(config)
    step = Step.after(cache, [cache.open(), cache.open()], [[0] * 9, [0] * 2])
    for layer in range(config.num_hidden_layers):
        LayerCache(step, layer).window_axis(torch.randn(11, config.head_dim))
    assert sum(store.nbytes for store in cache.window.values()) == 2 * window_kv_bytes(config)


@pytest.mark.parametrize("kv_quant", [True, False])
def test_entries_come_back_in_their_places(kv_quant: bool) -> None:
    """Pieces that do not fit pages, unequal sequences; values bit for bit as the fake quantisers give them."""
    config = tiny_config().text
    cache = Cache(config, kv_quant)
    lengths, pieces = [70, 9, 131], 4
    for layer, written in fill(cache, lengths, pieces).items():
        ratio = config.ratio(layer)
        main, index = written[-1][2]
        own = main.shape[0] // len(lengths)
        for number, length in enumerate(lengths):
            kv, keys = [], []
            for piece in range(pieces):
                counts = [(piece + 1) * n // pieces // ratio - piece * n // pieces // ratio for n in lengths]
                mine = slice(sum(counts[:number]), sum(counts[: number + 1]))
                kv.append(written[piece][0][mine])
                keys.append(written[piece][1][mine])
            kv, keys = torch.cat(kv), torch.cat(keys)
            got = slice(number * own, number * own + length // ratio)
            assert torch.equal(main[got], fake_quant_fp4(kv) if kv_quant else kv)
            assert torch.equal(index[got], keys)


def test_window_ring_wraps() -> None:
    """The ring holds the last W keys whatever the pieces; older ones and those of its row's last owner are hidden."""
    config = tiny_config(sliding_window=5).text
    cache = Cache(config)
    old = cache.open()
    stale = Step.after(cache, [old], [[0] * 7])
    LayerCache(stale, 0).window_axis(torch.full((7, config.head_dim), 9.0))
    cache.close(old)
    row, seen = cache.open(), torch.zeros(0, config.head_dim)
    assert row == old
    for count in (2, 1, 9, 1, 1, 3, 1):
        step = Step.after(cache, [row], [[0] * count])
        new = fake_quant_fp8(torch.randn(count, config.head_dim))
        seen = torch.cat([seen, new])
        if step.decoding:
            keys, hidden = LayerCache(step, 0).window_of_each(new)
            shown = keys[0][~hidden[0]]
            assert len(shown) == min(5, len(seen))
            order = [int((seen == key).all(1).nonzero()) for key in shown]
            assert sorted(order) == list(range(len(seen)))[-5:]
        else:
            keys, axis = LayerCache(step, 0).window_axis(new)
            assert torch.equal(keys, seen[-(count + min(4, len(seen) - count)) :])
            assert axis.place.tolist() == list(range(len(keys)))[-count:]
        step.commit()


def test_a_replayed_window_has_no_past() -> None:
    """What the ring held before a replay's start is hidden, also when the replay passes one token at a time."""
    config = tiny_config(sliding_window=5).text
    cache = Cache(config)
    row = cache.open()
    cache.rows[row].length = cache.rows[row].window_from = 8
    for number in range(7):
        step = Step.after(cache, [row], [[0]])
        _, hidden = LayerCache(step, 0).window_of_each(torch.randn(1, config.head_dim))
        assert (~hidden).sum() == min(5, number + 1)
        step.commit()


def test_open_groups_span_steps() -> None:
    """A group's tokens are joined across steps of any size."""
    config = tiny_config(compress_ratios=[0, 4, 4, 1, 1, 1]).text
    cache = Cache(config)
    row, at = cache.open(), 0
    values = torch.randn(40, config.head_dim)
    for count in (1, 1, 1, 1, 3, 2, 1, 10, 1, 5):
        step = Step.after(cache, [row], [[0] * count])
        joined, _ = LayerCache(step, 1).open_groups(values[at : at + count], values[at : at + count] + 1)
        entries = step.layout.entries[4]
        first = at // 4 * 4
        expected = values[first : (at + count) // 4 * 4].unflatten(0, (-1, 4))
        assert torch.equal(joined[entries.members.flatten()].unflatten(0, (-1, 4)), expected)
        step.commit()
        at += count


@torch.no_grad()
def forced(built: DeepseekV41, rows: torch.Tensor, chunk: int, decoded: int) -> torch.Tensor:
    """Logits [B, S, V] of known tokens [B, S]: prefill in chunks, the last `decoded` ones alone, all rows at a time."""
    cache = Cache(built.config.text, built.runtime.kv_quant)
    owned = [cache.open() for _ in rows]
    cuts = [*range(0, rows.shape[1] - decoded, chunk), *range(rows.shape[1] - decoded, rows.shape[1] + 1)]
    logits = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        step = Step.after(cache, owned, rows[:, begin:end].tolist())
        layers = range(built.config.text.num_hidden_layers)
        lookups = built.look_up(layers, step.ids, step.layout, step)
        state = built.init_streams(built.embed(step.ids))
        for layer in layers:
            state = built.run_block(layer, state, lookups, step.layout, step=step).state
        step.commit()
        logits.append(built.head(built.final_hidden(state)).unflatten(0, (len(rows), -1)))
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ["text", "engram", "heads512"])
def test_against_the_golden_numbers(name: str) -> None:
    """Chunked prefill and decode against the logits of another implementation, by the rule of test_without_help."""
    oracle = load_oracle(name)
    built = load_pretrained(oracle.folder, runtime=ForwardOptions())
    ids = oracle.inputs["input_ids"]
    logits = forced(built, ids, chunk=27, decoded=18)
    per_token = (logits - oracle.expected["logits"]).abs().amax(-1)
    median, bound = (3e-5, 3e-4) if name != "heads512" else (1e-4, 1e-2)
    assert per_token.median() <= median
    assert (per_token <= bound).float().mean() >= 0.9
