"""Of several that publish under one key the first is right."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch.distributed as dist

from helpers.ports import free_port
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.store import AtomicStore
from wingbeat.transport.torch_store import StoreWatch, TorchStore, _WithoutTraces, server_of


def test_first_claim_wins() -> None:
    tcp = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    stores: list[AtomicStore] = [TorchStore(dist.PrefixStore("a", tcp)), Switchboard()]
    for store in (*stores, TorchStore(dist.HashStore())):
        assert isinstance(store, AtomicStore)
        assert store.claim("key", "first") == "first"
        assert store.claim("key", "second") == "first"
        assert store.has("key")
        assert store.get("key", 1.0) == "first"


def test_warnings_of_torch_are_logged_again_after_the_last_request() -> None:
    quiet = _WithoutTraces()
    assert quiet._level is not None, "this build of torch has no log level at that name"
    before = quiet._level.value

    def fail() -> None:
        with quiet:
            raise RuntimeError("request")

    with quiet:
        with pytest.raises(RuntimeError, match="request"):
            fail()
        assert quiet._level.value == 2, "another request is under way"
    assert quiet._level.value == before < 2


# -- the end of its server --------------------------------------------------------------------

SERVER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serving", flush=True)
time.sleep(600)
"""

POLLS = """
import sys, threading, time, torch.distributed as dist
from wingbeat.observe.log import log_to_stderr
from wingbeat.transport.torch_store import StoreUnavailable, StoreWatch, TorchStore, WatchedStore
log_to_stderr("rank 1", leads=False)
port = int(sys.argv[1])
inner = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
store = TorchStore(WatchedStore(inner, StoreWatch("127.0.0.1", port, "it has ended", "advice")))
print("polling", flush=True)
def poll():
    while True:
        try:
            store.set("key", "value")
        except StoreUnavailable:
            return
threads = [threading.Thread(target=poll) for _ in range(3)]
for each in threads: each.start()
for each in threads: each.join()
begun = time.monotonic()
assert not any(store.has("key") for _ in range(1000))
assert time.monotonic() - begun < 5.0
"""


def test_killed_server_is_logged_in_one_line_without_stack_traces() -> None:
    """Also if requests are under way: three threads wait for answers of the stopped server."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "serving\n"
    client = subprocess.Popen(
        [sys.executable, "-c", POLLS, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "polling\n"
        server.send_signal(signal.SIGSTOP)
        process, before = psutil.Process(client.pid), -1.0
        while (now := sum(process.cpu_times()[:2])) != before:
            before = now
            time.sleep(0.3)
        server.kill()
        _, said = client.communicate(timeout=60)
        assert client.returncode == 0, said
        assert said == "wingbeat (rank 1): it has ended; advice\n"
    finally:
        for each in (server, client):
            each.kill()
            each.wait()
        server.stdout.close()


def test_watch_of_a_worker_that_leaves_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tcp = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    assert server_of(dist.PrefixStore("a", tcp)) == ("127.0.0.1", tcp.port)
    watch = StoreWatch("127.0.0.1", tcp.port, "it has ended", "advice")
    assert not watch.ended
    watch.quiet()
    del tcp
    deadline = time.monotonic() + 10.0
    while not watch.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch.close()
    assert not caplog.records


def test_other_stores_have_no_server() -> None:
    assert server_of(dist.HashStore()) is None
