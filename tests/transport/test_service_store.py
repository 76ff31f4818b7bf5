"""A server's requests and what they are answered with."""

from __future__ import annotations

import io
import json

import pytest

from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.services import PipeStore, answer_request


def test_requests_are_answered_from_the_store() -> None:
    store = Switchboard()
    assert answer_request('{"read": "a"}', store) == ("null", False)
    assert answer_request('{"set": "a", "value": "é\\n"}', store) == ("true", False)
    assert store.get("a", 0.0) == "é\n"
    text, last = answer_request('{"read": "a"}', store)
    assert (json.loads(text), last) == ("é\n", False)
    assert answer_request('{"ready": true}', store) == ("true", True)


@pytest.mark.parametrize(
    "line",
    ["", "hello", "[]", "7", "{}", '{"set": "a"}', '{"set": 1, "value": "b"}', '{"read": null}',
     '{"ready": false}', '{"set": "a", "value": {}}', "{" * 50],
)  # fmt: skip
def test_malformed_request_is_refused_and_stores_nothing(line: str) -> None:
    store = Switchboard()
    with pytest.raises(ValueError):  # noqa: PT011  json's and ours
        answer_request(line, store)
    assert not store._values


class Answers(io.StringIO):
    """The worker's side: each line that is written is answered at once."""

    def __init__(self, store: Switchboard) -> None:
        super().__init__()
        self.store, self.back = store, io.StringIO()

    def write(self, text: str) -> int:
        at = self.back.tell()
        self.back.seek(0, io.SEEK_END)
        self.back.write(answer_request(text, self.store)[0] + "\n")
        self.back.seek(at)
        return len(text)


def test_pipe_store_is_a_store() -> None:
    store = Switchboard()
    asks = Answers(store)
    pipe = PipeStore(asks, asks.back)
    assert not pipe.has("a")
    with pytest.raises(TimeoutError, match="a"):
        pipe.get("a", 0.03)
    pipe.set("a", "b\nc")
    assert pipe.has("a")
    assert pipe.get("a", 0.0) == store.get("a", 0.0) == "b\nc"
    pipe.ready()


@pytest.mark.parametrize("line", ["", "tr", "nonsense\n"])
def test_pipe_store_of_an_exited_worker_raises(line: str) -> None:
    with pytest.raises(TimeoutError, match="the worker that started this service has exited"):
        PipeStore(io.StringIO(), io.StringIO(line)).has("a")
    closed = io.StringIO()

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(TimeoutError, match="has exited"):
        PipeStore(Broken(), closed).set("a", "b")
