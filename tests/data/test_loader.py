import itertools
import json
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from data import DataConfig, DataError, build_loaders, merge_positions, special_ids
from data.errors import BadRecordPolicy
from data.open import open_sources

SEQ = 96


def loaders(cfg, tokenizer, **options):
    return build_loaders(cfg, tokenizer, **{"seq_len": SEQ, "batch_rows": 4, "seed": 1} | options)


def take(loader, count):
    return list(itertools.islice(loader, count))


def same(one, two):
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, two, strict=True)
    )


def pieces(batch):
    """Each piece of each row of a batch as a list of ids."""
    found = []
    for ids, lengths in zip(batch["input_ids"].tolist(), batch["seq_lens"].tolist(), strict=True):
        ends = np.cumsum(lengths)
        found += [ids[end - length : end] for end, length in zip(ends, lengths, strict=True) if length]
    return found


# What a batch is


def test_labels_never_cross_a_document_and_padding_is_marked(folder, tokenizer):
    train, valid = loaders(folder, tokenizer)
    special = special_ids(tokenizer)
    several = 0
    for batch in [*take(train, 10), *valid]:
        ids, labels, seq_lens = batch["input_ids"], batch["labels"], batch["seq_lens"]
        assert all(t.dtype == torch.int64 for t in batch.values())
        assert ids.shape == labels.shape == (len(ids), SEQ)
        for row in range(len(ids)):
            lengths = [n for n in seq_lens[row].tolist() if n]
            assert (seq_lens[row][len(lengths) :] == 0).all()
            used, firsts = sum(lengths), np.cumsum([0, *lengths])[:-1]
            assert (ids[row, used:] == special.pad).all() and (labels[row, used:] == -100).all()
            assert (labels[row, firsts] == -100).all()
            inner = np.setdiff1d(np.arange(used), firsts)
            assert torch.equal(labels[row, inner], ids[row, inner])
            for first, length in zip(firsts, lengths, strict=True):
                document = ids[row, first : first + length].tolist()
                assert special.bos not in document[1:] and special.eos not in document[:-1]
            several += len(lengths) > 1
    assert several


def one_epoch(train):
    """The batches of epoch 0 of a loader with batches of one row."""
    batches = []
    while True:
        batch = next(train)
        if train.epoch:
            return batches
        batches.append(batch)


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_an_epoch_holds_every_document_exactly_once_from_bos_to_eos(kind, request, tokenizer):
    cfg = request.getfixturevalue(kind)
    train, _ = loaders(cfg, tokenizer, batch_rows=1)
    special = special_ids(tokenizer)
    found = Counter(token for batch in one_epoch(train) for piece in pieces(batch) for token in piece)
    expected = Counter()
    for document, _ in open_sources(cfg)[0].read(BadRecordPolicy("stop")):
        expected.update([special.bos, *tokenizer.encode(document.text, add_special_tokens=False).ids, special.eos])
    assert found == expected and expected[special.bos] > 5


def test_pieces_of_a_cut_document_continue_each_other(folder, tokenizer):
    train, _ = loaders(folder, tokenizer, batch_rows=1)
    found = [piece for batch in one_epoch(train) for piece in pieces(batch)]
    special = special_ids(tokenizer)
    document = next(iter(open_sources(folder)[0].read(BadRecordPolicy("stop"))))[0]
    whole = [special.bos, *tokenizer.encode(document.text, add_special_tokens=False).ids, special.eos]
    at = 0
    while at < len(whole):
        fitting = [piece for piece in found if piece == whole[at : at + len(piece)]]
        assert fitting
        at += len(max(fitting, key=len))


# Order


def test_order_depends_on_seed_and_epoch_and_nothing_else(folder, tokenizer):
    first = take(loaders(folder, tokenizer)[0], 40)
    assert same(first, take(loaders(folder, tokenizer)[0], 40))
    assert not same(first[:3], take(loaders(folder, tokenizer, seed=2)[0], 3))
    train, _ = loaders(folder, tokenizer, batch_rows=1)
    epochs = [one_epoch(train)]
    state = train.state_dict() | {"epoch": 1, "window": 0, "row": 0, "start": None}
    train.load_state_dict(state)
    epochs.append(take(train, len(epochs[0])))
    assert not same(*epochs)
    folder.shuffle = False
    plain = take(loaders(folder, tokenizer, seed=1)[0], 3)
    assert same(plain, take(loaders(folder, tokenizer, seed=2)[0], 3)) and not same(plain, first[:3])


@pytest.mark.parametrize("kind", ["folder", "stream"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_global_batch_is_the_same_for_any_world_size(kind, world_size, request, tokenizer):
    cfg = request.getfixturevalue(kind)
    alone, _ = loaders(cfg, tokenizer)
    ranks = [loaders(cfg, tokenizer, row_group=rank, row_groups=world_size)[0] for rank in range(world_size)]
    for _ in range(12):
        whole, parts = next(alone), [next(rank) for rank in ranks]
        for name in ("input_ids", "labels"):
            assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))
        assert pieces(whole) == [piece for part in parts for piece in pieces(part)]
    states = [rank.state_dict() for rank in ranks]
    assert alone.state_dict() == merge_positions(states if kind == "stream" else states[-1:])


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_rows_are_shuffled_and_none_is_lost(kind, request, tokenizer):
    cfg = request.getfixturevalue(kind)
    cfg.window_tokens = 10**6  # one window an epoch
    shuffled = [piece for batch in one_epoch(loaders(cfg, tokenizer, batch_rows=1)[0]) for piece in pieces(batch)]
    cfg.shuffle = False
    plain = [piece for batch in one_epoch(loaders(cfg, tokenizer, batch_rows=1)[0]) for piece in pieces(batch)]

    assert shuffled != plain
    if kind == "stream":  # its documents keep their order, so packing is the same and only rows move
        assert sorted(shuffled) == sorted(plain)
    assert Counter(t for p in shuffled for t in p) == Counter(t for p in plain for t in p)


# Position


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_a_saved_position_resumes_exactly_at_every_batch(kind, request, tokenizer):
    cfg = request.getfixturevalue(kind)
    train, _ = loaders(cfg, tokenizer, batch_rows=3)
    states, batches = [], []
    for _ in range(60):  # several windows and more than an epoch
        states.append(json.dumps(train.state_dict()))
        batches.append(next(train))
    last = json.loads(states[-1])
    window = last["window"] if kind == "folder" else last["positions"]["0"]["sources"][""]["window"]
    assert train.epoch >= 1 and window + train.epoch >= 2
    assert max(map(len, states)) < 2_000
    other, _ = loaders(cfg, tokenizer, batch_rows=3)
    for at in (0, 1, 17, 40, 59, 5):  # also backwards, and over what the reading thread has prepared
        other.load_state_dict(json.loads(states[at]))
        assert same(take(other, min(8, 60 - at)), batches[at : at + 8])


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_reading_ahead_changes_neither_batches_nor_positions(kind, request, tokenizer):
    """The saved position is that of the batch handed out, however far the thread has read."""
    cfg, threads = request.getfixturevalue(kind), set()
    plain, ahead = (loaders(cfg, tokenizer, batch_rows=3)[0] for _ in range(2))

    def finish(batch):
        threads.add(threading.current_thread().name)
        return dict(batch)

    batches = ahead.ahead(finish, depth=4)
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(20):
        assert same([next(plain)], [next(batches)])
        assert ahead.state_dict() == plain.state_dict()
    assert threads == {"batches_0"}
    other = loaders(cfg, tokenizer, batch_rows=3)[0]
    other.load_state_dict(ahead.state_dict())
    assert same(take(other.ahead(dict, 2), 3), take(plain, 3))


def test_an_error_of_the_reading_thread_comes_in_place_of_its_batch(folder, tokenizer):
    numbers = itertools.count()

    def finish(batch):
        if next(numbers) == 2:
            raise ValueError("the third batch")
        return batch

    batches = loaders(folder, tokenizer)[0].ahead(finish, depth=3)
    take(batches, 2)
    with pytest.raises(ValueError, match="the third batch"):
        next(batches)


def test_a_position_moves_to_another_world_and_batch_size(folder, tokenizer):
    train, _ = loaders(folder, tokenizer, batch_rows=4)
    take(train, 5)
    state, following = train.state_dict(), take(train, 2)
    ranks = [loaders(folder, tokenizer, batch_rows=2, row_group=rank, row_groups=2)[0] for rank in (0, 1)]
    for rank in ranks:
        rank.load_state_dict(state)
    rows = [next(rank)["input_ids"] for _ in range(4) for rank in ranks]
    assert torch.equal(torch.cat(rows), torch.cat([batch["input_ids"] for batch in following]))


@pytest.mark.parametrize("kind", ["folder", "stream", "mixture"])
def test_longer_rows_lose_and_repeat_no_token_and_resume_exactly(kind, request, tokenizer):
    """Rows of 96, then of 192, then of 288 tokens; streams are dealt out to 6, 3 and 2 lanes, the rows of a step."""
    cfgs = {name: request.getfixturevalue(name) for name in ("folder", "stream") if kind in (name, "mixture")}
    cfg = next(iter(cfgs.values()))
    if kind == "mixture":
        given = {name: {"source": c.source, "paths": c.paths, "streaming": c.streaming} for name, c in cfgs.items()}
        given = {name: {**part, "weight": 1, "validation_rows": 4} for name, part in given.items()}
        cfg = DataConfig(mixture=given, cache_dir=cfg.cache_dir, validation_share=0.2, window_tokens=1500)

    def opened(length, position=None):
        rows = 576 // length
        loader, valid = loaders(cfg, tokenizer, batch_rows=1, step_rows=rows, train_seq_len=length)
        if position is not None:
            loader.load_state_dict(json.loads(position))
        assert loader.seq_len == length and next(iter(valid))["input_ids"].shape[1] == SEQ
        return loader

    train, lengths, states, batches = opened(SEQ), [SEQ] * 5 + [192] * 4 + [288] * 4, [], []
    for length in lengths:
        if length != train.seq_len:
            train = opened(length, json.dumps(train.state_dict()))
        states.append(json.dumps(train.state_dict()))
        batches.append(next(train))
    assert [batch["input_ids"].shape[1] for batch in batches] == lengths
    for at in (12, 0, 5, 6, 9, 10):
        again = opened(lengths[at], states[at])
        end = at + 1 + lengths[at + 1 :].count(lengths[at])
        assert same(take(again, end - at), batches[at:end])
    if kind == "folder":
        assert json.loads(states[9])["earlier"] == [[96, 5], [192, 4]], "both changes are inside a window"
        while train.epoch == 0:
            batches.append(next(train))
        used = Counter(token for batch in batches[:-1] for token in tokens_of(batch))
        whole = one_epoch(loaders(cfg, tokenizer, batch_rows=1)[0])
        assert used == Counter(token for batch in whole for token in tokens_of(batch))


def tokens_of(batch):
    return [token for piece in pieces(batch) for token in piece]


def test_a_position_of_other_data_or_settings_is_refused_naming_all_of_them(folder, tokenizer):
    state = loaders(folder, tokenizer)[0].state_dict()
    with pytest.raises(ValueError, match="seq_len was 96 .* is 64") as caught:
        loaders(folder, tokenizer, seq_len=64, seed=9)[0].load_state_dict(state)
    assert "seed was 1 " in str(caught.value)
    changed = next(p for p in sorted(open_sources(folder)[0].files)).path
    changed.write_text("other text")
    with pytest.raises(ValueError, match="data was"):
        loaders(folder, tokenizer)[0].load_state_dict(state)


# Validation


def test_validation_is_finite_repeatable_and_the_same_for_every_seed(folder, tokenizer):
    _, valid = loaders(folder, tokenizer)
    batches = list(valid)
    assert len(batches) == len(valid) > 1
    assert same(batches, list(valid)) and same(batches, list(loaders(folder, tokenizer, seed=5)[1]))


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_validation_rows_limit_what_is_evaluated(kind, request, tokenizer):
    cfg = request.getfixturevalue(kind)
    cfg.validation_rows = 3
    _, valid = loaders(cfg, tokenizer, batch_rows=2)
    assert [len(batch["input_ids"]) for batch in valid] == [2, 1]


def test_validation_shares_cover_all_rows_once_and_ranks_step_together(folder, tokenizer):
    folder.validation_rows = 7
    _, alone = loaders(folder, tokenizer)
    ranks = [loaders(folder, tokenizer, row_group=rank, row_groups=4)[1] for rank in range(4)]
    batches = [list(rank) for rank in ranks]
    assert {len(b) for b in batches} == {len(alone)}
    found = [piece for step in zip(*batches, strict=True) for part in step for piece in pieces(part)]
    assert found == [piece for batch in alone for piece in pieces(batch)]
    last = batches[3][-1]  # seven rows over four ranks: the eighth is padding
    assert (last["labels"] == -100).all() and (last["seq_lens"] == 0).all()


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_bytes_per_token_is_exact(kind, request, tokenizer):
    _, valid = loaders(request.getfixturevalue(kind), tokenizer)
    special = special_ids(tokenizer)
    tokens = size = 0
    for batch in valid:
        targets = batch["labels"][batch["labels"] != -100]
        tokens += len(targets)
        # of a byte-level tokenizer a token's spelling has one character a byte
        size += sum(len(tokenizer.id_to_token(t)) for t in targets.tolist() if t != special.eos)
    assert (valid.target_tokens, valid.target_bytes) == (tokens, size)
    assert valid.bytes_per_token == size / tokens
    if kind == "folder":
        assert valid.stats.bytes == sum(
            len(d.text.encode())
            for d, _ in open_sources(request.getfixturevalue(kind))[1].read(BadRecordPolicy("stop"))
        )


def test_train_and_validation_share_no_document(folder, tokenizer):
    train, valid = loaders(folder, tokenizer, batch_rows=1)
    firsts = [{tuple(p[:20]) for b in batches for p in pieces(b) if p[0] == 0} for batches in (one_epoch(train), valid)]
    assert firsts[0] and firsts[1] and not firsts[0] & firsts[1]


# Cache and bad input


def test_documents_are_tokenised_once(folder, tokenizer, monkeypatch):
    first = take(loaders(folder, tokenizer)[0], 3)
    monkeypatch.setattr("data.tokens._write", lambda *a: pytest.fail("tokenised again"))
    assert same(first, take(loaders(folder, tokenizer)[0], 3))
    open_sources(folder)[0].files[0].path.write_text("changed")
    with pytest.raises(pytest.fail.Exception, match="tokenised again"):
        loaders(folder, tokenizer)


def test_bad_input_leaves_nothing_behind_and_can_be_skipped(folder, tokenizer):
    bad = open_sources(folder)[0].files[3].path
    bad.write_bytes(b"ok\n\xff")
    with pytest.raises(DataError, match=f"{bad.name}:2: invalid UTF-8"):
        loaders(folder, tokenizer)
    cache = folder.cache_path
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []
    folder.on_error = "skip"
    train, _ = loaders(folder, tokenizer)
    assert train.stats.skipped == {"invalid UTF-8": 1} and "skipped 1 x invalid UTF-8" in str(train.stats)
    assert loaders(folder, tokenizer)[0].stats.skipped == {"invalid UTF-8": 1}  # also when it comes from the cache


def test_bad_input_in_a_stream_stops_or_is_counted(stream, tokenizer, tmp_path):
    with (tmp_path / "0.jsonl").open("a") as file:
        file.write("[]\n")
    with pytest.raises(DataError, match="0.jsonl:21: record is not an object"):
        take(loaders(stream, tokenizer)[0], 40)
    stream.on_error = "skip"
    train, _ = loaders(stream, tokenizer)
    take(train, 10)
    assert train.stats.skipped["record is not an object"] >= 1


@pytest.mark.parametrize("streaming", [False, True])
def test_data_without_a_usable_document_is_refused(tmp_path, tokenizer, streaming):
    (tmp_path / "a.jsonl").write_text("[]\n" * 3)
    (tmp_path / "b.jsonl").write_text('{"text": "held out"}\n')
    cfg = DataConfig(
        source="jsonl",
        paths=[str(tmp_path / "a.jsonl")],
        validation_paths=[str(tmp_path / "b.jsonl")],
        cache_dir=str(tmp_path / ".cache"),
        on_error="skip",
        streaming=streaming,
        validation_rows=2,
        window_tokens=1000,
    )
    with pytest.raises(DataError, match="no documents"):
        loaders(cfg, tokenizer)


def test_an_unusable_cache_folder_is_named(folder, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    folder.cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(DataError, match="set data.cache_dir"):
        loaders(folder, tokenizer)
