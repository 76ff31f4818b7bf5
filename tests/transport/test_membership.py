"""The membership log and its client: concurrent writers, malformed entries, restarted processes."""

from __future__ import annotations

import json
import threading

import pytest

from wingbeat.errors import RendezvousError
from wingbeat.schema import MalformedMessage
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.membership import (
    LogEntry,
    MembershipChange,
    MembershipClient,
    MembershipLog,
    View,
    covers,
    initial_view,
    members,
    merge_views,
    with_incarnation,
    without_worker,
)


def test_ended_incarnation_does_not_return() -> None:
    view = without_worker(initial_view(3), 1)
    assert members(view) == (0, 2)
    assert without_worker(view, 1) == view
    again = with_incarnation(view, 1, 1)
    assert members(again) == (0, 1, 2)
    assert with_incarnation(without_worker(again, 1), 1, 1) == without_worker(again, 1)


def test_merge_is_commutative() -> None:
    a, b = (
        without_worker(initial_view(3), 0),
        with_incarnation(without_worker(initial_view(3), 1), 1, 2),
    )
    assert merge_views(a, b) == merge_views(b, a) == View((1, 4, 0))
    assert covers(merge_views(a, b), a)
    assert not covers(a, b)
    assert not covers(View((-1, -1, -1)), initial_view(3))


def test_membership_log_append_returns_changes() -> None:
    log = MembershipLog(3)
    assert log.append(json.dumps(LogEntry(1, View((0, 0, 1))))) == [
        MembershipChange(2, 0, False, 1)
    ]
    assert log.append(json.dumps(LogEntry(2, View((0, 0, 2))))) == [MembershipChange(2, 1, True, 2)]
    both = log.append(json.dumps(LogEntry(2, View((0, 0, 4)))))
    assert both == [MembershipChange(2, 1, False, 2), MembershipChange(2, 2, True, 2)]
    assert log.append(json.dumps(LogEntry(0, View((0, 0, 3))))) == []
    assert log.view == (0, 0, 4)
    assert log.length == 4
    assert not log.lacks(View((0, 0, 3)))
    assert log.lacks(View((1, 0, 0)))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[0]", "[3, [0, 0, 0]]", "[0, [0, 0]]", "[0, [0, 0, -1]]", "[0, [0, 0, true]]",
     "[" * 100_000, "[true, [0, 0, 0]]", "[0, 5]"],
)  # fmt: skip
def test_malformed_log_entry_is_rejected(text: str) -> None:
    with pytest.raises(MalformedMessage, match=r"JSON|author|view|list"):
        MembershipLog(3).append(text)


def test_concurrent_proposals_are_appended_in_order() -> None:
    store = Switchboard()
    one, two = (MembershipClient(store, "r", w, 4) for w in range(2))
    one.propose(View((0, 0, 1, 0)))
    two.propose(View((0, 0, 1, 1)))
    one.synchronize()
    two.synchronize()
    one.synchronize()
    assert one.log.view == two.log.view == (0, 0, 1, 1)
    assert one.log.length == 2
    assert two.take_changes() == [
        MembershipChange(2, 0, False, 0),
        MembershipChange(3, 0, False, 1),
    ]


def test_malformed_card_is_logged_and_log_is_read_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Switchboard()
    roll = MembershipClient(store, "r", 0, 3)
    store.set("messages/r/1.1", '{"session": Infinity}')
    store.set("membership/r/0", json.dumps(LogEntry(1, View((0, 2, 0)))))
    store.set("membership/r/1", json.dumps(LogEntry(1, View((0, 2, 1)))))
    heard = threading.Event()
    roll.start(heard.set)
    try:
        assert heard.wait(20.0)
        changes = roll.take_changes()
    finally:
        roll.stop()
    assert MembershipChange(2, 0, False, 1) in changes
    assert not any(change.joined for change in changes)
    refused = "rank 0: cannot accept rank 1 again: malformed peer info, 'messages/r/1.1' in the"
    assert caplog.text.count(refused) == 1


def test_removed_worker_writes_no_entry() -> None:
    store = Switchboard()
    one, two = (MembershipClient(store, "r", w, 2) for w in range(2))
    one.propose(View((0, 1)))
    one.synchronize()
    two.propose(View((1, 0)))
    two.synchronize()
    assert two.log.view == (0, 1)
    assert not store.has("membership/r/1")


def test_restarted_worker_joins_with_next_incarnation() -> None:
    store = Switchboard()
    assert MembershipClient(store, "r", 1, 3).register() == 0
    client = MembershipClient(store, "r", 1, 3)
    assert client.register() == 1
    for other in (0, 2):
        store.set(f"membership/r/accepted/1.1/{other}", "1")
    assert client.announce(1, 1.0) == {0: 0, 2: 0}
    assert client.log.view == (0, 2, 0)
    assert MembershipClient(store, "r", 1, 3).register() == 2


def test_announce_without_acknowledgement_names_worker() -> None:
    store = Switchboard()
    store.set("membership/r/accepted/1.1/0", "1")
    client = MembershipClient(store, "r", 1, 3)
    with pytest.raises(
        RendezvousError, match=r"rank 1: rank 2 did not accept the restarted process wit"
    ):
        client.announce(1, 0.1)


def test_announce_does_not_wait_for_lost_worker() -> None:
    store, whole_ = Switchboard(), initial_view(3)
    store.set("membership/r/accepted/1.1/0", "1")
    store.set("membership/r/0", json.dumps(LogEntry(1, View((0, 2, 0)))))
    store.set("membership/r/1", json.dumps(LogEntry(0, View((0, 0, 1)))))
    client = MembershipClient(store, "r", 1, 3)
    assert client.log.view == whole_
    assert client.announce(1, 5.0) == {0: 0}
    assert client.log.length == 1  # later entries are read by the client


def test_announce_with_occupied_rank_raises() -> None:
    store = Switchboard()
    store.set("membership/r/0", json.dumps(LogEntry(1, View((0, 4, 0)))))
    with pytest.raises(RendezvousError, match="rank 1: another process has joined with this rank"):
        MembershipClient(store, "r", 1, 3).announce(1, 1.0)


def test_first_of_two_that_end_each_other_continues() -> None:
    store = Switchboard()
    one, two = (MembershipClient(store, "r", w, 2) for w in range(2))
    one.end(1)
    two.end(0)
    assert one.log.view == two.log.view == (0, 1)
    assert not store.has("membership/r/1")


def test_worker_that_shuts_down_has_left_until_it_returns() -> None:
    store = Switchboard()
    one, two, three = (MembershipClient(store, "r", w, 3) for w in range(3))
    two.end(1, left=True)
    one.end(2)
    three.synchronize()
    assert (three.log.view, three.log.left) == ((0, 1, 1), {1})
    three.log.append(json.dumps(LogEntry(1, View((0, 2, 0)))))
    assert three.log.left == frozenset()
