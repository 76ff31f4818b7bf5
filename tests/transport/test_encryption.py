"""Which connections are encrypted, and with which keys."""

from __future__ import annotations

import contextlib
import logging
import socket

import pytest

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport import encryption

SAME = [["10.0.0.1"], ["10.0.0.1"]]
TWO_HOSTS = [["10.0.0.1"], ["10.0.0.2"]]


@pytest.mark.parametrize(
    ("argument", "variable", "chosen"),
    [
        (None, None, None),
        (None, "1", True),
        (None, "0", False),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_argument_has_precedence_over_environment(
    argument: bool | None, variable: str | None, chosen: bool | None
) -> None:
    env = {} if variable is None else {"WINGBEAT_ENCRYPTED": variable}
    assert encryption.choose(argument, env) is chosen


def test_other_word_in_the_environment_is_refused() -> None:
    with pytest.raises(UsageError, match=r"WINGBEAT_ENCRYPTED='yes'.*allowed are 0 and 1"):
        encryption.choose(None, {"WINGBEAT_ENCRYPTED": "yes"})


@pytest.mark.parametrize(
    ("choice", "addresses", "needed"),
    [
        (True, SAME, True),
        (None, TWO_HOSTS, True),
        (None, SAME, False),
        (False, TWO_HOSTS, False),
    ],
)
def test_processor_without_the_instructions_is_refused_only_where_they_are_needed(
    choice: bool | None,
    addresses: list[list[str]],
    needed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "can_encrypt", lambda: False)
    refused = pytest.raises(UsageError, match="rank 0: this processor has no AES instructions")
    with refused if needed else contextlib.nullcontext():
        encryption.check(0, [choice, choice], addresses, b"key")


@pytest.mark.parametrize(
    ("rank", "choice", "job_key", "lines"),
    [(0, None, None, 1), (1, None, None, 0), (0, None, b"key", 0), (0, False, None, 0)],
)
def test_keys_from_the_store_are_logged_by_rank_0(
    rank: int,
    choice: bool | None,
    job_key: bytes | None,
    lines: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "wingbeat")
    encryption.check(rank, [choice, choice], TWO_HOSTS, job_key)
    assert len(caplog.records) == lines
    assert all("set WINGBEAT_JOB_KEY on all workers" in each.message for each in caplog.records)


def test_ends_have_each_others_keys_and_every_connection_has_its_own() -> None:
    with socket.socket() as unused:
        made = [
            encryption.keys(True, unused, key, connecting, handshake)
            for key in (b"a" * 32, b"b" * 32)
            for handshake in (b"x" * 80, b"y" * 80)
            for connecting in (True, False)
        ]
    for one, other in zip(made[::2], made[1::2], strict=True):
        assert one[:16] == other[16:]
        assert one[16:] == other[:16]
    halves = {half for each in made for half in (each[:16], each[16:])}
    assert len(halves) == 8
