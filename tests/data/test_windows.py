import numpy as np

from data.errors import BadRecordPolicy
from data.open import open_sources
from data.sources import JsonLines
from data.tokens import Encoder, TokenStore
from data.windows import StoredWindows, StreamedWindows


def test_a_window_of_a_stream_is_read_from_its_own_start(stream, tokenizer, monkeypatch):
    def windows():
        encoder = Encoder(tokenizer, 96, None, count_bytes=False)
        return StreamedWindows(open_sources(stream)[0], encoder, BadRecordPolicy("stop"), stream.window_tokens, seed=1)

    def read(policy, start, read=JsonLines.read):
        starts.append(start)
        return read(source, policy, start)

    going = windows()
    start = going.load(0, 0, None).after
    expected = going.load(0, 1, start)
    resumed, starts = windows(), []
    source = resumed.source.source
    monkeypatch.setattr(source, "read", read)
    found = resumed.load(0, 1, start)
    assert starts == [start] and start is not None
    assert np.array_equal(found.store.tokens, expected.store.tokens) and found.after == expected.after
    assert np.array_equal(found.rows.start, expected.rows.start)


def test_shares_of_stored_documents_are_the_epoch_without_repeats():
    """As for a mixture of a stream and other data, whose lanes each have a share of both."""
    lengths = np.arange(5, 36)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    store = TokenStore(np.arange(offsets[-1], dtype=np.uint16), offsets, None, 0, {}, {})
    for epoch in (0, 1):
        found = []
        for index in range(3):
            windows, start, number = StoredWindows(store, 32, 128, seed=1, share=(index, 3)), None, 0
            while number == 0 or start is not None:
                window = windows.load(epoch, number, start)
                found += np.unique(window.rows.document).tolist()
                start, number = window.after, number + 1
        assert sorted(found) == list(range(len(lengths)))
