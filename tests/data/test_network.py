"""What fails because of the network is tried again, and nothing is lost or repeated."""

import pickle

import pytest

from data import DataConfig, DataError, NetworkError
from data import network as network_module
from data.errors import BadRecordPolicy
from data.network import passes, retried
from data.open import open_sources
from data.sources import HubDataset


class Response:
    def __init__(self, status_code):
        self.status_code = status_code


class HubError(Exception):
    def __init__(self, status):
        self.response = Response(status)


@pytest.fixture
def waited(monkeypatch):
    found = []
    monkeypatch.setattr(network_module.time, "sleep", found.append)
    return found


def test_only_what_may_pass_is_tried_again():
    offline = type("OfflineModeIsEnabled", (ConnectionError,), {})()
    wrapped = ValueError("cannot load")
    wrapped.__cause__ = HubError(503)
    refused = ConnectionError("offline")
    refused.__cause__ = offline
    assert passes(ConnectionResetError()) and passes(TimeoutError()) and passes(HubError(429)) and passes(wrapped)
    assert not passes(HubError(404)) and not passes(ValueError()) and not passes(offline) and not passes(refused)


def test_waits_grow_and_the_end_is_a_network_error(waited):
    def fails():
        raise ConnectionError("Couldn't reach the hub")

    with pytest.raises(NetworkError, match="user/set: the network or the server does not answer: 8 tries failed"):
        retried(fails, "user/set")
    assert len(waited) == 7 and all(wait <= after for wait, after in zip(waited, waited[1:], strict=False))
    assert 127 <= sum(waited) <= 160
    again = pickle.loads(pickle.dumps(NetworkError("user/set", 0, "gone", "now")))
    assert isinstance(again, NetworkError) and str(again) == "user/set: gone: now"


def test_a_data_set_is_opened_when_the_hub_answers_again(waited, monkeypatch):
    import datasets

    answers = [ConnectionError("away"), HubError(502), datasets.Dataset.from_list([{"text": "one"}])]

    def load(*given, **options):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    cfg = DataConfig(source="hub", paths=["user/set"], hub_validation_split="test")
    answers.append(answers[-1])
    open_sources(cfg)
    assert len(waited) == 2 and not answers
    answers += [HubError(401)]
    with pytest.raises(DataError, match="cannot open data set") as caught:
        open_sources(cfg)
    assert not isinstance(caught.value, NetworkError) and len(waited) == 2


@pytest.mark.slow
def test_a_stream_goes_on_where_the_network_failed(waited):
    import datasets

    failures = [3, 3, 8]

    def records(shards):
        for shard in shards:
            for number in range(5):
                if failures and failures[0] == (at := 5 * shard + number):
                    failures.pop(0)
                    raise TimeoutError(f"no answer at {at}")
                yield {"text": f"record {5 * shard + number}"}

    stream = datasets.IterableDataset.from_generator(records, gen_kwargs={"shards": [0, 1]})
    source = HubDataset(stream, "user/set", "text", streaming=True)
    found = [document.text for document, _ in source.read(BadRecordPolicy("stop"))]
    assert found == [f"record {number}" for number in range(10)] and len(waited) == 3 and not failures
    failures += [4] * 8
    with pytest.raises(NetworkError, match="user/set: .* 8 tries failed, the last one with: no answer at 4"):
        list(source.read(BadRecordPolicy("stop")))
