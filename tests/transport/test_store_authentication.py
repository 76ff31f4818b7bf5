"""What the store holds counts only if it was written with the job's key."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.methods.model_averaging.static_client import StatusTable
from wingbeat.schema import to_json
from wingbeat.transport import torch_store
from wingbeat.transport.failures import FailureAttribution, has_exited, has_finished, publish_exit
from wingbeat.transport.membership import (
    LogEntry,
    MembershipClient,
    View,
    initial_view,
    without_worker,
)
from wingbeat.transport.rendezvous import check_job
from wingbeat.transport.services import answer_request
from wingbeat.transport.torch_store import (
    MAX_VALUE_BYTES,
    TAG_PREFIX,
    Authenticator,
    RejectedValue,
    TorchStore,
    job_key,
)

KEY = b"sixteen or more characters"


def sealed(raw: dist.Store) -> TorchStore:
    return TorchStore(raw, Authenticator(KEY, "0/0/job"))


def forgeries(name: str, value: str) -> list[str | bytes]:
    """What a stranger may write who can read the store but has no key."""
    other = Authenticator(b"another key of the kind", "0/0/job").sign(name, value)
    elsewhere = Authenticator(KEY, "0/0/job").sign(f"{name}1", value)
    another_job = Authenticator(KEY, "0/0/another").sign(name, value)
    right = Authenticator(KEY, "0/0/job").sign(name, value)
    changed = [
        right + "1",
        right[:-1],
        right.upper(),
        right[1:],
        f"{TAG_PREFIX}:{value}",
        TAG_PREFIX,
    ]
    return [value, other, elsewhere, another_job, *changed, "", "?", b"\xff\xfe"]


def test_a_value_comes_back_as_it_was_written() -> None:
    raw = dist.HashStore()
    store = sealed(raw)
    for value in ("", "1", "a:b", f"{TAG_PREFIX}x", "ä\n" * 1000):
        store.set("key", value)
        assert (store.has("key"), store.get("key", 1.0), store.peek("key")) == (True, value, value)
        assert raw.get("key").decode().startswith(TAG_PREFIX)


@pytest.mark.parametrize("forged", forgeries("key", "7"), ids=str)
def test_forged_value_counts_as_missing(forged: str | bytes) -> None:
    raw = dist.HashStore()
    raw.set("key", forged)
    store = sealed(raw)
    assert not store.has("key")
    with pytest.raises(TimeoutError, match="key: "):
        store.get("key", 0.02)
    assert store.claim("key", "7") == "7", "it is written over"
    assert store.get("key", 1.0) == "7"
    assert store.claim("key", "8") == "7"


def test_reader_waits_for_the_valid_value_after_a_forged_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = dist.HashStore()
    raw.set("key", "forged")
    store = sealed(raw)
    later = threading.Timer(0.2, sealed(raw).set, ("key", "right"))
    later.start()
    with caplog.at_level(logging.WARNING, "wingbeat"):
        assert store.get("key", 60.0) == "right"
    later.join()
    assert [r.message for r in caplog.records] == [
        "the value of key in the store is rejected: its authentication tag is wrong or "
        "missing: it was not written with this job's key"
    ]


def test_replace_compares_the_signed_value() -> None:
    store = sealed(dist.HashStore())
    store.set("key", "a")
    assert store.replace("key", "b", "c") == "a"
    assert store.replace("key", "a", "c") == "c"


def test_repeatedly_forged_value_is_named_by_its_key() -> None:
    raw = dist.HashStore()

    class Busy:
        """Writes another forged value after each look."""

        number = 0

        def compare_set(self, key: str, expected: Any, value: str) -> bytes:
            raw.set(key, f"forged {self.number}")
            self.number += 1
            return raw.compare_set(key, expected, value)

    with pytest.raises(RejectedValue, match="key: another process keeps writing it"):
        sealed(Busy()).claim("key", "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("authenticator", [None, Authenticator(KEY, "")])
def test_too_large_value_is_rejected(
    authenticator: Authenticator | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_VALUE_BYTES == 16 << 20
    monkeypatch.setattr(torch_store, "MAX_VALUE_BYTES", 1000)
    raw = dist.HashStore()
    TorchStore(raw, authenticator).set("key", "x" * 1001)
    with pytest.raises(TimeoutError, match=r"key: 10\d\d bytes, more than 1000|key: 1073 bytes"):
        TorchStore(raw, authenticator).get("key", 0.02)


# -- what readers make of it ------------------------------------------------------------------


def test_forged_membership_entry_removes_no_worker() -> None:
    raw = dist.HashStore()
    text = json.dumps(to_json(LogEntry(2, without_worker(initial_view(3), 1))))
    for make, evicted in ((TorchStore, [1]), (sealed, [])):
        store = make(raw)
        client = MembershipClient(store, "room", 0, 3)
        raw.set("membership/room/0", text)
        client.synchronize()
        assert [change.worker for change in client.take_changes()] == evicted
    # A proposal is written in place of the forged entry.
    client.propose(without_worker(initial_view(3), 2))
    client.synchronize()
    assert [change.worker for change in client.take_changes()] == [2]


def test_forged_exit_or_failure_is_ignored() -> None:
    raw = dist.HashStore()
    store = sealed(raw)
    blame = FailureAttribution(store, 0, 3, 0.1)
    raw.set("left/1", "finished")
    raw.set("waited/1", "2 all-reduce")
    assert not has_exited(store, 1)
    assert not has_finished(store, 1)
    assert blame.awaited_by(1) is None
    assert blame.operation(1) == ""
    publish_exit(store, 1, finished=True)
    assert has_finished(store, 1)


def test_a_forged_rejoin_or_loss_does_not_reach_the_generator_or_the_status_table() -> None:
    raw = dist.HashStore()
    store = sealed(raw)
    raw.set("membership/room/0", json.dumps(to_json(LogEntry(1, View((0, 3, 0, 0))))))
    raw.set("room/fallback/1", "7")
    raw.set("room/status/1", "[1, true, 1, 1]")
    client, table = MembershipClient(store, "room", 3, 4), StatusTable(store, "room", 3, 0)
    client.synchronize()
    assert client.take_changes() == []
    assert (table.lost(), table.fallbacks([1]), table.statuses()) == (set(), {}, {})


def test_service_reads_a_forged_value_as_missing() -> None:
    raw = dist.HashStore()
    raw.set("key", "forged")
    assert answer_request('{"read": "key"}', sealed(raw)) == ("null", False)
    raw.set("key", b"\xff")
    assert answer_request('{"read": "key"}', TorchStore(raw)) == ("null", False), (
        "also without a key"
    )


# -- the key ----------------------------------------------------------------------------------


def test_a_short_key_is_refused_and_not_shown() -> None:
    assert job_key({}) is None
    assert job_key({"WINGBEAT_JOB_KEY": "x" * 16}) == b"x" * 16
    with pytest.raises(
        UsageError, match="WINGBEAT_JOB_KEY has 6 characters: set at least 16"
    ) as caught:
        job_key({"WINGBEAT_JOB_KEY": "secret"})
    assert "secret" not in str(caught.value)


def test_key_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("x" * 16 + "\n")
    assert job_key({"WINGBEAT_JOB_KEY_FILE": str(path)}) == b"x" * 16


def test_unusable_file_of_the_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    env = {"WINGBEAT_JOB_KEY_FILE": str(path)}
    with pytest.raises(UsageError, match=r"WINGBEAT_JOB_KEY_FILE=.*: No such file.*: name a file"):
        job_key(env)
    path.write_text("secret\n")
    with pytest.raises(UsageError, match=r"WINGBEAT_JOB_KEY_FILE=.* has 6 characters"):
        job_key(env)
    with pytest.raises(UsageError, match="both WINGBEAT_JOB_KEY and WINGBEAT_JOB_KEY_FILE are set"):
        job_key({**env, "WINGBEAT_JOB_KEY": "x" * 16})


@pytest.mark.parametrize("keys", [(KEY, None), (None, KEY), (KEY, b"another key of the kind")])
def test_workers_with_different_keys_are_refused_soon(
    keys: tuple[bytes | None, bytes | None],
) -> None:
    raw = dist.HashStore()
    stores = [TorchStore(raw, None if key is None else Authenticator(key, "0/0")) for key in keys]
    check_job(stores[0], 0, 2, "", 60.0, "node1:29500")
    begin = time.monotonic()
    with pytest.raises(RendezvousError, match="WINGBEAT_JOB_KEY"):
        check_job(stores[1], 1, 2, "", 60.0, "node1:29500")
    assert time.monotonic() - begin < 30


def test_rank_0_overwrites_a_forged_job_name() -> None:
    raw = dist.HashStore()
    raw.set("job", json.dumps(["evil", False, 2]))
    store = TorchStore(raw, Authenticator(KEY, "0/0"))
    assert check_job(store, 0, 2, "mine", 1.0, "") == "mine"
    assert check_job(store, 1, 2, "mine", 1.0, "") == "mine"
