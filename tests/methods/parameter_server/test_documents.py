"""`Document`: fragments are reassembled, and malformed documents are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.methods.parameter_server.protocol import Document, RequestError, split_document


@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(1, 20))
def test_split_document_is_reassembled(arrays: list[bytes], largest: int) -> None:
    first, *more = split_document({"a": [1, None]}, [memoryview(a) for a in arrays], largest)
    document = Document(first, max_nbytes=1000)
    assert all(0 < len(payload) <= largest for payload in more)
    for payload in more:
        assert not document.complete
        document.append(payload)
    assert document.complete
    assert bytes(document.data) == b"".join(arrays)
    assert document.fields["a"] == [1, None]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"{}", b"[]", b"7", json.dumps({"nbytes": -1}), json.dumps({"nbytes": 1.0}),
     json.dumps({"nbytes": True}), b"[" * 100_000],
)  # fmt: skip
def test_document_without_valid_fields_raises(payload: Any) -> None:
    payload = payload.encode() if isinstance(payload, str) else payload
    with pytest.raises(RequestError, match="malformed document"):
        Document(payload, max_nbytes=1000)


def test_document_over_limit_raises_before_allocation() -> None:
    with pytest.raises(RequestError, match="a document of 1099511627776 bytes; 10 bytes are free"):
        Document(json.dumps({"nbytes": 1 << 40}).encode(), max_nbytes=10)


@pytest.mark.parametrize("extra", [b"", b"abcd"])
def test_append_of_empty_or_large_fragment_raises(extra: bytes) -> None:
    document = Document(b'{"nbytes": 3}', max_nbytes=10)
    with pytest.raises(RequestError, match=f"{len(extra)} bytes where 3 remain"):
        document.append(extra)
