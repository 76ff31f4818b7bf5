"""`ServerConfig` and the limits of the message layer."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any

import pytest

from wingbeat.methods.parameter_server.server import SOONER, WINDOW, Server, ServerConfig, limits_of
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES

CONFIG = ServerConfig(
    room="servers/", index=1, ranks=(0, 1), hosts=(0, 1), interfaces=("lo",), classes=2,
    encrypted=True, timeout=5.0, max_sum_bytes=1 << 20, order="ready",
)  # fmt: skip


def test_config_round_trips_through_json() -> None:
    assert ServerConfig.from_json(CONFIG.to_json()) == CONFIG


def test_processes_are_named_by_ranks_of_the_job() -> None:
    column = dataclasses.replace(CONFIG, ranks=(1, 5))
    assert [column.name(number) for number in range(4)] == [
        "rank 1", "rank 5", "server 0 (started by rank 1)", "server 1 (started by rank 5)"
    ]  # fmt: skip


@pytest.mark.parametrize("links", [1, 2, 4])
@pytest.mark.parametrize("classes", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 16, 64, 500])
def test_limits_of_all_flows_respect_window(workers: int, classes: int, links: int) -> None:
    limits = limits_of(workers, classes, 10.0, links)
    least, flows = 2 * (limits.message + MAX_HEADER_BYTES), workers * classes * links
    assert limits.silence == 8.0 < SOONER * 10.0, "a dead card is named, and not who it leads to"
    assert least <= limits.window <= 32 << 20
    assert flows * limits.window <= max(WINDOW, flows * least)


def test_limits_of_server_and_workers_are_equal() -> None:
    two = dataclasses.replace(CONFIG, interfaces=("eth0", "eth1"))
    assert two.limits == limits_of(2, 2, 5.0, 2)
    assert two.limits.window == CONFIG.limits.window // 2
    alone = dataclasses.replace(CONFIG, ranks=(0,), interfaces=())
    assert alone.limits == limits_of(1, 2, 5.0)


@pytest.mark.parametrize("strangers", [{}, {"key": 2, "protocol": 1}])
def test_refused_senders_are_logged_in_one_line(
    strangers: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Box:
        refused_connections, refused = (
            Counter(strangers),
            Counter({"magic": 4} if strangers else {}),
        )
        left = lost = ()

        def interrupter(self) -> None:
            pass

    monkeypatch.setattr(Server, "run", lambda *_: None)
    mailbox: Any = Box()
    with caplog.at_level(logging.WARNING):
        CONFIG.serve(mailbox, CONFIG.make_aggregator(), lambda: True)
    assert caplog.messages == (
        ["server 1 (started by rank 1) refused 7 connections or frames of unknown senders: "
         "key 2, magic 4, protocol 1"] if strangers else []
    )  # fmt: skip
