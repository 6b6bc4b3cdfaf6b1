import numpy as np

from data.errors import BadRecordPolicy
from data.open import open_sources
from data.sources import JsonLines
from data.tokens import Encoder
from data.windows import StreamedWindows


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
