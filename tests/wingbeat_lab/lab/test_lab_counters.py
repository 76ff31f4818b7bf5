from __future__ import annotations

import json
import socket
import sys

import pytest

from wingbeat_lab.lab import counters
from wingbeat_lab.lab.counters import ClassCounters, InterfaceCounters, LabStats, PortStats
from wingbeat_lab.lab.inner import worker_environment
from wingbeat_lab.lab.network import explain
from wingbeat_lab.lab.spec import LabSpec

PROC = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:     100       2    0    0    0     0          0         0      100       2    0    0    0
  eth0: 5000000    4000    0    0    0     0          0         0  7000000    5000    0    0    0
"""

TC = """qdisc noqueue 0: dev lo root refcnt 2
 Sent 0 bytes 0 pkt (dropped 0, overlimits 0 requeues 0)
 backlog 0b 0p requeues 0
qdisc htb 1: dev eth0 root refcnt 9 r2q 10 default 0x11 direct_packets_stat 0 direct_qlen 1000
 Sent 305 bytes 3 pkt (dropped 0, overlimits 0 requeues 0)
 backlog 0b 0p requeues 0
qdisc bfifo 11: dev eth0 parent 1:11 limit 6250000b
 Sent 100 bytes 1 pkt (dropped 0, overlimits 0 requeues 0)
 backlog 0b 0p requeues 0
qdisc bfifo 10: dev eth0 parent 1:10 limit 6250000b
 Sent 205 bytes 2 pkt (dropped 7, overlimits 0 requeues 0)
 backlog 0b 0p requeues 0
qdisc tbf 1: dev eth1 root refcnt 9 rate 1Gbit burst 96Kb lat 49.2ms
 Sent 4242 bytes 9 pkt (dropped 1, overlimits 3 requeues 0)
 backlog 0b 0p requeues 0
"""


def test_proc_net_dev_is_parsed_by_interface() -> None:
    parsed = counters.parse_proc_net_dev(PROC)
    assert parsed["eth0"] == InterfaceCounters(5_000_000, 4000, 7_000_000, 5000)
    assert parsed["eth0"] - parsed["lo"] == InterfaceCounters(4_999_900, 3998, 6_999_900, 4998)


def test_qdiscs_with_and_without_priorities() -> None:
    assert counters.parse_qdiscs(TC, 2) == {
        "eth0": {"be": ClassCounters(100, 1, 0), "ef": ClassCounters(205, 2, 7)}
    }
    assert counters.parse_qdiscs(TC, 0)["eth1"] == {"all": ClassCounters(4242, 9, 1)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/net/dev is Linux's")
def test_counters_read_own_traffic() -> None:
    before = counters.read()["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            sender.sendall(bytes(10_000))
            received = 0
            while received < 10_000:
                received += len(receiver.recv(65536))
    assert (counters.read()["lo"] - before).tx_bytes >= 10_000


def test_stats_round_trip_through_json() -> None:
    port = PortStats(InterfaceCounters(1, 2, 3, 4), {"ef": ClassCounters(5, 6, 7)}, {})
    stats = LabStats("star:1@1gbit", {"h0": {"eth0": port}}, {"a -> b": {}})
    assert LabStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats


def test_worker_environment_counts_ranks_through_hosts() -> None:
    spec = LabSpec.parse("star:2x2@1gbit")
    base = {"HOME": "/root", "RANK": "99", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = worker_environment(base, spec, 3, 2, ("10.0.0.1", 29500))
    assert env == {
        "HOME": "/root",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "WINGBEAT_LAB": "star:2x2@1gbit",
    }


def test_worker_environment_keeps_what_the_user_set() -> None:
    base = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth1"}
    env = worker_environment(base, LabSpec.parse("loopback:2"), 0, 1, ("127.0.0.1", 1))
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("3", "eth1")
    assert env["NCCL_SOCKET_IFNAME"] == "lo"


def test_explained_failure_names_the_line() -> None:
    stderr = "Error: Specified qdisc kind is unknown.\nCommand failed -:2\n"
    assert explain(stderr, ["one", "two"]) == "Error: Specified qdisc kind is unknown. (in: two)"
    assert explain("", ["one"]) == "no message"
