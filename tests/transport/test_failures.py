from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from wingbeat.errors import PeerError
from wingbeat.transport import failures
from wingbeat.transport.failures import (
    FailureAttribution,
    first_failed,
    publish_exit,
    publish_failure,
    published_failure,
)
from wingbeat.transport.loopback import Switchboard


@pytest.mark.parametrize("silent", [0, 2, 3])
def test_every_rank_names_the_rank_that_waited_for_none(silent: int) -> None:
    store, size = Switchboard(), 4
    ranks = [rank for rank in range(size) if rank != silent]

    def fail(rank: int) -> int:
        blame = FailureAttribution(store, rank, size, timeout=0.5)
        blame.publish_wait((rank - 1) % size)
        return blame.root_cause((rank - 1) % size)

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(fail, ranks)) == [silent] * 3


def culprits(waits: dict[int, int], size: int) -> dict[int, int]:
    """Whom each blames, when all have published for whom they waited."""
    store = Switchboard()
    blames = {rank: FailureAttribution(store, rank, size, timeout=0.1) for rank in waits}
    for rank, peer in waits.items():
        blames[rank].publish_wait(peer)
    return {rank: blames[rank].root_cause(peer) for rank, peer in waits.items()}


def test_rank_that_waited_has_not_finished() -> None:
    """A script may catch what it was told, and end in an orderly way."""
    store = Switchboard()
    blame = FailureAttribution(store, 1, 2, timeout=0.1)
    for rank in range(2):
        publish_exit(store, rank, finished=True)
    blame.publish_wait(0)
    assert [blame.has_finished(rank) for rank in range(2)] == [True, False]


def test_cycle_of_waits_names_no_own_rank() -> None:
    assert culprits({0: 1, 1: 0}, 2) == {0: 1, 1: 0}
    assert culprits({0: 1, 1: 2, 2: 0}, 3) == {0: 1, 1: 2, 2: 0}


def test_wait_for_a_cycle_names_its_member() -> None:
    assert culprits({3: 0, 0: 1, 1: 2, 2: 1}, 4) == {3: 1, 0: 1, 1: 2, 2: 1}


def test_exited_rank_is_not_awaited_for_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", float("inf"))  # it would never end
    store = Switchboard()
    publish_exit(store, 1, finished=False)
    blame = FailureAttribution(store, 0, 2, timeout=float("inf"))
    assert blame.root_cause(1) == 1
    assert not blame.has_finished(1)


@pytest.mark.parametrize("nonsense", ["", "seven", "-1", "99"])
def test_malformed_waits_are_not_followed(nonsense: str) -> None:
    store = Switchboard()
    store.set("waited/2", nonsense)
    assert FailureAttribution(store, 0, 4, timeout=0.1).root_cause(2) == 2


@pytest.mark.timeout(30)
def test_search_takes_at_most_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", float("inf"))  # it would never end
    assert FailureAttribution(Switchboard(), 0, 2, timeout=0.05).root_cause(1) == 1


def test_wait_published_at_the_deadline_counts() -> None:
    """It says for whom it waited, and then that it leaves: between two looks of this rank."""

    class Store(Switchboard):
        asked = False

        def has(self, key: str) -> bool:
            known = super().has(key)
            if not self.asked:
                self.asked = True
                FailureAttribution(self, 1, 3, timeout=0.05).publish_wait(2)
                publish_exit(self, 1, finished=False)
            return known

    assert FailureAttribution(Store(), 0, 3, timeout=0.05).root_cause(1) == 2


def test_operation_of_a_peer_is_shortened_to_one_line() -> None:
    store = Switchboard()
    blame = FailureAttribution(store, 0, 3, timeout=0.05)
    assert blame.operation(1) == ""
    FailureAttribution(store, 1, 3, timeout=0.05).publish_wait(2, "all-reduce of bucket 3")
    assert blame.operation(1) == "all-reduce of bucket 3"
    FailureAttribution(store, 1, 3, timeout=0.05).publish_wait(2, "x" * 10_000)
    assert blame.operation(1) == "x" * 80


def test_search_in_a_group_waits_once() -> None:
    store = Switchboard()
    blame = FailureAttribution(store, 0, 3, timeout=0.05, prefix="group/1/")
    assert blame.root_cause(1) == 1
    FailureAttribution(store, 1, 3, timeout=0.05, prefix="group/1/").publish_wait(2)
    assert (
        FailureAttribution(store, 0, 3, timeout=float("inf"), prefix="group/1/").root_cause(1) == 1
    )
    assert FailureAttribution(store, 0, 3, timeout=0.05, prefix="group/2/").root_cause(2) == 2


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("boom\nsecond line"), "ValueError: boom"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Unprintable(), "Unprintable"),
        (ValueError("\x1b[31mred\udc80"), "ValueError: ?[31mred?"),
        (ValueError("x" * 10_000), ("ValueError: " + "x" * 10_000)[:200]),
    ],
)
def test_exception_is_published_as_one_printable_bounded_line(
    error: BaseException, told: str
) -> None:
    store = Switchboard()
    assert published_failure(store, 1) == ""
    publish_failure(store, 1, error)
    assert published_failure(store, 1) == told


def test_exception_in_the_store_is_cut_and_made_printable() -> None:
    store = Switchboard()
    store.set("failed/1", "\x1b[2J\n" + "y" * 10_000)
    assert published_failure(store, 1) == "?[2J?" + "y" * 195


def test_first_failed_rank_is_none_that_waited_for_another() -> None:
    store = Switchboard()
    publish_failure(store, 0, PeerError("rank 0: rank 2 failed"))
    assert first_failed(store, range(3)) is None
    publish_failure(store, 2, KeyError("k"))
    assert first_failed(store, range(3)) == (2, "KeyError: 'k'")
