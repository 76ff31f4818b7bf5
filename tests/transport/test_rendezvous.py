"""What `init` says when the workers do not find each other, and that it leaves nothing open."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import wingbeat
from helpers.pool import Pool
from helpers.ports import free_port
from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.schema import to_json
from wingbeat.transport import interfaces as nic
from wingbeat.transport import launchers, loopback, rendezvous
from wingbeat.transport import world as world_module
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import Link
from wingbeat.transport.rendezvous import measure_speeds
from wingbeat.transport.replica_jobs import TorchJob
from wingbeat.transport.torch_store import TorchStore
from wingbeat.transport.world import World
from wingbeat.types import Layout

SCRIPT = """
import sys, time, wingbeat
begin = time.monotonic()
try:
    wingbeat.init(timeout=float(sys.argv[1]), interfaces=sys.argv[2:] or None)
except wingbeat.errors.WingbeatError as err:
    print(f"{type(err).__name__}|{time.monotonic() - begin:.1f}|{err}")
"""


def say(env: dict[str, str], *args: str) -> tuple[str, float, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT.replace("import sys", "import wingbeat.errors, sys", 1),
            *args,
        ],
        env={**clean, **env, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    kind, seconds, message = done.stdout.strip().rpartition("\n")[2].split("|", 2)
    assert "\n" not in message
    return kind, float(seconds), message


def test_a_missing_worker_is_named_with_the_wait() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    kind, seconds, message = say({**env, "MASTER_PORT": str(free_port())}, "2")
    assert kind == "RendezvousError"
    assert message.startswith("rank 0")
    assert seconds < 30


def test_store_without_a_server_is_named() -> None:
    port = str(free_port())
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    kind, _, message = say(env, "2")
    assert kind == "RendezvousError"
    assert f"rank 1 did not reach the store at 127.0.0.1:{port}" in message


HOLDS = """
import sys, wingbeat
wingbeat.init(timeout=60)
print("joined", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_of_other_jobs_are_refused_each_with_its_reason() -> None:
    """Two workers train; four others come to their address and port, as of a second job."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    named = {"TORCHELASTIC_RUN_ID": "another"}
    job = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS],
            env={**os.environ, **env, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [worker.stdout.readline() for worker in job if worker.stdout] == ["joined\n"] * 2
        others = [{"RANK": "0"}, {"RANK": "1"}, {"RANK": "1"} | named]
        others.append({"RANK": "2", "WORLD_SIZE": "3"})
        with ThreadPoolExecutor() as pool:
            said = list(pool.map(lambda other: say({**env, **other}, "1"), others))
        assert {kind for kind, _, _ in said} == {"RendezvousError"}
        port_in_use, taken, other_job, other_size = (message for _, _, message in said)
        assert "rank 0 cannot serve the store at 127.0.0.1:" in port_in_use
        assert "another job or program uses the port" in port_in_use
        assert "rank 1 is taken: a process of the job whose store is at 127.0.0.1:" in taken
        assert "rank 1 belongs to job 'another', but the store at 127.0.0.1:" in other_job
        assert "rank 2 is one of 3 workers (WORLD_SIZE), but the store at" in other_size
        for worker in job:
            worker.communicate("")
        assert [worker.returncode for worker in job] == [0, 0]
    finally:
        for worker in job:
            worker.kill()
            worker.communicate()


@pytest.mark.slow  # test_launchers has each variable
def test_half_of_torchruns_environment_is_refused() -> None:
    kind, _, message = say({"RANK": "0"}, "2")
    assert kind == "UsageError"
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in message
    assert "torchrun" in message


def test_invalid_timeout_is_refused() -> None:
    with pytest.raises(UsageError, match=r"timeout=0: allowed are seconds above 0"):
        wingbeat.init(timeout=0)


@pytest.mark.parametrize("dscp", [-1, 64, 46.0, True, None, "ef"])
def test_invalid_class_is_refused(dscp: Any) -> None:
    with pytest.raises(UsageError, match=r"dscp=.*: allowed are the integers 0 to 63"):
        wingbeat.init(dscp=dscp)


@pytest.mark.parametrize("cuda", ["gloo", None, True])
def test_invalid_carrier_of_cuda_tensors_is_refused(cuda: Any) -> None:
    with pytest.raises(UsageError, match=r"cuda=.*: allowed are 'nccl' and 'tcp'"):
        wingbeat.init(cuda=cuda)


DIFFERS = """
import os, wingbeat, wingbeat.errors
try:
    wingbeat.init(timeout=60, cuda="tcp" if os.environ["RANK"] == "1" else "nccl")
except wingbeat.errors.UsageError as error:
    print(error)
"""


def test_workers_that_differ_in_the_carrier_of_cuda_tensors_are_refused() -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = [
        subprocess.Popen(
            [sys.executable, "-c", DIFFERS],
            env={**os.environ, **env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=90)[0] for process in job]
    assert "cuda='nccl' on rank 0 and 'tcp' on rank 1: pass the same" in said[0]
    assert "cuda='tcp' on rank 1 and 'nccl' on rank 0: pass the same" in said[1]


def test_a_second_init_is_refused_and_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    [world] = loopback.worlds(1)
    monkeypatch.setattr(world_module, "_current", world)
    with pytest.raises(UsageError, match="called twice"):
        wingbeat.init()
    assert world_module.current() is world


def test_init_while_a_spawned_process_imports_the_main_script_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would find its parent's rank in the environment, and take its place."""
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="put the training code under if __name__ == '__main__':"):
        wingbeat.init()


SPAWNS = """
import multiprocessing, wingbeat
wingbeat.init()
multiprocessing.get_context("spawn").Process(target=print, args=("ran",)).start()
"""


@pytest.mark.slow
def test_spawned_process_of_an_unguarded_script_raises(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SPAWNS, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert "UsageError: wingbeat.init() was called while a process spawned" in ended.stderr
    assert "ran" not in ended.stdout


def test_a_rank_that_publishes_nothing_is_named() -> None:
    world = loopback.worlds(2, timeout=0.2)[0]
    with pytest.raises(
        RendezvousError, match=r"rank 0: rank 1 published nothing for 'model' within"
    ):
        world.exchange("model", {})


@pytest.mark.parametrize("text", ["__import__('os')", "[" * 100_000], ids=["code", "deep"])
def test_invalid_json_is_refused(text: str) -> None:
    world = loopback.worlds(2, timeout=0.2)[0]
    world.store.set("1/model/1", text)
    with pytest.raises(RendezvousError, match="rank 0: rank 1 published malformed model: "):
        world.exchange("model", {})


def test_links_share_a_tensor_by_their_speed() -> None:
    class Slow(loopback.LoopbackLink):
        """Delivers a fifth as fast as its time says, by waiting on a real clock."""

        def recv(self, tensor, peer, tag):
            pending = super().recv(tensor, peer, tag)
            delay = threading.Event()

            class Late:
                def wait(self, seconds: float) -> None:
                    pending.wait(seconds)
                    delay.wait(tensor.numel() / 2e6)

            return Late()

    board = loopback.Switchboard()
    members = loopback.worlds(2, switchboard=board, interfaces=2)
    # Slow for rank 1 only: rank 0 measures nothing of it by itself.
    members[1].links = (members[1].links[0], Slow(board, 1, "lo1"))
    first, second = loopback.run(members, measure_speeds)
    assert first == second
    assert 0 < first[1] < 0.2 * first[0]
    assert members[0].weights == (0.5, 0.5), "as it was made"


Seconds = Callable[[int, str, int], float]
"""Of a rank's exchange on a link, for a number of bytes."""


def speeds(monkeypatch: pytest.MonkeyPatch, size: int, seconds: Seconds) -> list[float]:
    """What every rank makes of two links whose transfers take stated times."""

    def exchange_seconds(world: World, link: Link, nbytes: int) -> float:
        return seconds(world.rank, link.name, nbytes)

    monkeypatch.setattr(rendezvous, "_exchange_seconds", exchange_seconds)
    found = loopback.run(loopback.worlds(size, interfaces=2), measure_speeds)
    assert all(each == found[0] for each in found)
    return list(found[0])


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_link_is_as_fast_as_its_slowest_rank(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(rank: int, link: str, nbytes: int) -> float:
        return nbytes / (1e6 if (rank, link) == (slow, "lo1") else 4e6)

    assert speeds(monkeypatch, 3, seconds) == pytest.approx([4e6, 1e6])


def test_messages_grow_until_latency_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 KB the far link takes 74 times as long, and of 16 MB hardly longer."""
    tried: list[int] = []

    def seconds(rank: int, link: str, nbytes: int) -> float:
        if link == "lo0":
            return nbytes / 4e8
        tried.append(nbytes)
        return 0.003 + nbytes / 4e8

    near, far = speeds(monkeypatch, 2, seconds)
    assert far / near == pytest.approx(1.0, abs=0.1)
    sizes = sorted(set(tried))
    assert sizes[0] == 16 << 10
    assert all(later == 2 * earlier for earlier, later in pairwise(sizes))


def test_messages_grow_to_16_mb_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def seconds(rank: int, link: str, nbytes: int) -> float:
        tried.append(nbytes)
        return nbytes / 1e12

    assert speeds(monkeypatch, 2, seconds) == pytest.approx([1e12, 1e12])
    assert max(tried) == 16 << 20


@pytest.mark.parametrize("late", [1, 2, 3, 12, 13])
def test_a_host_that_is_busy_for_a_moment_makes_no_link_slow(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early on, when small messages travel, it would make a fast link a hundred times slower."""
    count = dict.fromkeys(("lo0", "lo1"), 0)

    def seconds(rank: int, link: str, nbytes: int) -> float:
        count[link] += rank == 0
        delayed = rank == 0 and link == "lo1" and count[link] in (late, late + 1)
        return nbytes / 1e8 + 0.3 * delayed

    assert speeds(monkeypatch, 2, seconds) == pytest.approx([1e8, 1e8])
    assert max(count.values()) <= 14 + 2


def test_send_that_no_rank_receives_ends_the_measurement() -> None:
    class Unread:
        def wait(self, seconds: float) -> None:
            raise RuntimeError("connection closed by peer")

    class HalfDeaf(loopback.LoopbackLink):
        def send(self, tensor, peer, tag):
            super().send(tensor, peer, tag)
            return Unread()

    board = loopback.Switchboard()
    members = loopback.worlds(3, switchboard=board, interfaces=2)
    for world in members:
        world.links = (world.links[0], HalfDeaf(board, world.rank, "lo1"))
    with pytest.raises(PeerError, match="rank 0: measuring interface lo1 with ranks 2 and 1"):
        loopback.run(members, measure_speeds)


def column(names: Sequence[str], layout: Layout, job_layout: Layout) -> list[tuple[float, ...]]:
    """Return what each rank of a column knows of its links; ``names`` are their interfaces."""
    job = loopback.worlds(1)[0]
    job.layout, job.interfaces, job.speeds = job_layout, ("eth0", "eth1"), (8e6, 4e6)
    members = loopback.worlds(len(names))
    for world, name in zip(members, names, strict=True):
        world.layout, world.interfaces = layout, ("eth0", name)
    return loopback.run(members, lambda world: rendezvous._known_speeds(world, job))


@pytest.mark.parametrize(("per_host", "share"), [(1, 1), (4, 4)])
def test_column_over_the_links_of_the_job_knows_its_share_of_them(
    per_host: int, share: int
) -> None:
    found = column(["eth1"] * 2, Layout.even(2, 1), Layout.even(2, per_host))
    assert found == [(8e6 / share, 4e6 / share)] * 2


@pytest.mark.parametrize(
    ("names", "layout"),
    [(["eth1", "eth2"], Layout.even(2, 1)), (["eth1", "eth1"], Layout.even(1, 2))],
    ids=["another interface of one rank", "one host"],
)
def test_column_over_other_links_than_the_jobs_measures_them(
    names: list[str], layout: Layout
) -> None:
    assert column(names, layout, Layout.even(2, 4)) == [(), ()]


# -- what init leaves as it was ---------------------------------------------------------------


def test_a_variable_is_set_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINGBEAT_TEST", raising=False)
    before = dict(os.environ)
    inside = rendezvous._environment("WINGBEAT_TEST", "eth0")
    inside.__enter__()
    assert os.environ["WINGBEAT_TEST"] == "eth0"
    error = KeyError()
    assert not inside.__exit__(KeyError, error, None), "it goes on to the caller"
    assert dict(os.environ) == before
    monkeypatch.setenv("WINGBEAT_TEST", "the user's")
    with rendezvous._environment("WINGBEAT_TEST", "eth0"):
        assert os.environ["WINGBEAT_TEST"] == "the user's"
    assert os.environ["WINGBEAT_TEST"] == "the user's"


def test_a_process_keeps_its_store_and_each_init_sets_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_stores", {})
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    rank, size, store = rendezvous._rendezvous(7.0)
    assert (rank, size, store.timeout) == (0, 1, timedelta(seconds=7))
    assert rendezvous._rendezvous(9.0)[2] is store
    assert store.timeout == timedelta(seconds=9)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert rendezvous._rendezvous(9.0)[2] is not store, "another place to meet"


def test_worker_restarted_alone_opens_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    TorchStore(dist.PrefixStore("wingbeat/0/0", store)).set("job", json.dumps(["a", False, 3]))
    TorchStore(dist.PrefixStore("wingbeat/0/1", store)).set("job", json.dumps(["a", False, 3]))
    monkeypatch.setenv("WINGBEAT_JOB_ID", "a")
    met: list[int] = []
    good = json.dumps([1.0] * len(nic.choose([nic.local()] * 3, 1, None)))
    speeds = iter([good, good])

    def connect(world: World, *_: object) -> None:
        """What those who meet tell each other is kept for whoever comes back."""
        met.append(world.rank)
        for rank in range(3):
            world.store.set(f"1/interfaces/{rank}", json.dumps(to_json(nic.local())))
            world.store.set(f"2/networks/{rank}", json.dumps([f"10.0.{rank}.0/24"]))
            places = [["127.0.0.1", 1, ""]] * len(json.loads(good))
            world.store.set(f"3/connections/{rank}", json.dumps(["0f" * 32, "", None, *places]))
        world.store.set("left/1", "failed")
        world.store.set("published/speeds/0", next(speeds))

    monkeypatch.setattr(rendezvous, "_rendezvous", lambda timeout: (1, 3, store))
    monkeypatch.setattr(rendezvous, "_connect", connect)
    monkeypatch.setattr(rendezvous, "_generation", iter([0, 0, 1]))
    monkeypatch.setattr(world_module, "_current", None)
    for returned in (False, True, False):  # the last is another world of the same job
        world = rendezvous.init(timeout=5)
        assert world.returned == returned
        assert not returned or not world.store.has("left/1"), "it is there again"
        rendezvous.shutdown()
        if returned:
            assert world.networks == (("10.0.0.0/24",), ("10.0.1.0/24",), ("10.0.2.0/24",))
            assert world.interfaces
            assert world.layout == Layout([0, 0, 0])
            assert world.speeds == tuple(json.loads(good))
            assert world.make_links is not None
            with pytest.raises(UsageError, match="rank 1 was restarted while the others continue"):
                world.exchange("layers", 1)
    assert met == [1, 1]


def test_ranks_with_one_host_identity_share_a_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [nic.Host(name, ()) for name in ("a", "b", "a", "c", "b")]
    world = World(2, 5, (), (), 5.0, TorchStore(dist.HashStore()))
    for told in ("", "2", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
        assert rendezvous._layout_of(world, hosts) == Layout([0, 1, 0, 2, 1])
    assert not caplog.messages
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    rendezvous._layout_of(world, hosts)
    assert "LOCAL_WORLD_SIZE is 4, but 2 of the ranks are on its host: a container" in caplog.text
    caplog.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    rendezvous._layout_of(world, hosts)
    assert "is 1, but 2 of the ranks are on its host: several launchers run there" in caplog.text
    caplog.clear()
    world.torch_job = TorchJob(2, 2, "")  # rank 0, on the same host, was started by another one
    assert rendezvous._layout_of(world, hosts) == Layout([0, 1, 0, 2, 1])
    assert not caplog.messages


@pytest.mark.parametrize(
    "speeds", [7, [0.5, 0.5, 0.5], ["1"], [0.0], [-1.0], [True], [float("inf")], [float("nan")]]
)
def test_malformed_speeds_are_refused(speeds: object) -> None:
    store = TorchStore(dist.HashStore())
    store.set("published/speeds/0", json.dumps(speeds))
    world = World(1, 3, (), (), 5.0, store)
    with pytest.raises(RendezvousError, match="rank 1: rank 0 published malformed speeds: "):
        rendezvous._read_speeds(world, 1)


def test_fork_connects_with_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that shared a store would read each other's answers."""
    monkeypatch.setattr(rendezvous, "_stores", {})
    monkeypatch.setattr(rendezvous, "_open_store", lambda timeout: (0, 1, dist.HashStore()))
    for name in launchers.VARIABLES:
        monkeypatch.setenv(name, "1")
    store = rendezvous._rendezvous(7.0)[2]
    assert rendezvous._rendezvous(7.0)[2] is store
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert rendezvous._rendezvous(7.0)[2] is not store


def test_group_made_by_the_script_is_not_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in launchers.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    wingbeat.init()
    try:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        wingbeat.shutdown()
        assert dist.is_initialized()
    finally:
        wingbeat.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def test_store_is_awaited_up_to_the_timeout() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="missing"):
        rendezvous.TorchStore(store).get("missing", 0.1)
    assert time.monotonic() - begin < 10


def networks(*subnets: list[str]) -> list[tuple[tuple[str, ...], ...] | str]:
    """What each rank makes of what all say about their interfaces."""

    def body(world: World) -> tuple[tuple[str, ...], ...] | str:
        chosen = [Interface(f"eth{i}", "10.0.0.1", s) for i, s in enumerate(subnets[world.rank])]
        try:
            return rendezvous._exchange_networks(world, chosen)
        except UsageError as err:
            return str(err)

    return loopback.run(loopback.worlds(len(subnets), timeout=5), body)


def test_all_know_the_networks_of_all() -> None:
    wired = [["10.0.0.0/24", "10.1.0.0/24"], ["10.0.0.0/24", "10.1.1.0/24"]]
    assert networks(*wired) == [tuple(map(tuple, wired))] * 2


def test_rank_with_more_interfaces_is_named_on_all_ranks() -> None:
    """Each would wait in vain for the other's, until its timeout."""
    found = networks(["a"], ["a"], ["a", "b"])
    assert len(set(found)) == 1
    assert "rank 2 uses 2 network interfaces and rank 0 1: name as many" in str(found[0])


@pytest.mark.parametrize("answer", ["7", '"10.0.0.0/24"', '["10.0.0.0/24", 3]', "null", "{}"])
def test_malformed_networks_are_refused(answer: str) -> None:
    world = loopback.worlds(2, timeout=0.2)[0]
    world.store.set("1/networks/1", answer)
    with pytest.raises(RendezvousError, match="rank 0: rank 1 published malformed networks: "):
        rendezvous._exchange_networks(world, [])


def ends_at_once_but_rank_0_connects_slowly() -> None:
    """Rank 0 is told of its connections late; then the others may not have left."""
    real = rendezvous.tcp.connect

    def slow(rank: int, *args: Any, **options: Any) -> Any:
        links = real(rank, *args, **options)
        if rank == 0:
            time.sleep(0.3)
            dist.distributed_c10d._get_default_store().set("rank 0 is connected", "")
        return links

    rendezvous.tcp.connect = slow
    try:
        wingbeat.init(timeout=20)
        store = dist.distributed_c10d._get_default_store()
        assert store.check(["rank 0 is connected"]), "init returned before rank 0 was connected"
    finally:
        rendezvous.tcp.connect = real
        wingbeat.shutdown()


def test_no_rank_leaves_before_all_are_connected(fresh_pool: Callable[[int], Pool]) -> None:
    fresh_pool(3).run(ends_at_once_but_rank_0_connects_slowly)


def test_unusable_interface_of_gloo_socket_ifname_is_named() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "no0"}
    port = str(free_port())
    other = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("import sys", "import wingbeat.errors, sys", 1), "9"],
        env={**os.environ, **env, "MASTER_PORT": port, "RANK": "1"},
        stdout=subprocess.DEVNULL,
    )
    kind, _, message = say({**env, "MASTER_PORT": port}, "9")
    assert other.wait(timeout=60) == 0
    assert kind == "RendezvousError"
    assert "default process group with GLOO_SOCKET_IFNAME=no0" in message


def test_port_that_a_former_process_still_holds_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    held = socket.create_server(("", 0))
    port = held.getsockname()[1]
    assert not rendezvous._await_port(port, time.monotonic() + 0.01)
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: held.close())
    assert rendezvous._await_port(port, time.monotonic() + 20.0)
