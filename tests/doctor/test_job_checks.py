"""The checks of a job: what differs between hosts, and what does not arrive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.hosts import facts_of, host_of, listening_of, path_to
from wingbeat.doctor.checks import FAILED, OK, WARNING, Finding
from wingbeat.doctor.facts import Listening, Nic
from wingbeat.doctor.job_checks import Job, job


def job_of(*changes: dict[str, Any], networks: tuple[int, ...] = (0,), **options: Any) -> Job:
    """A job of two hosts in which everything works, with changed facts of each rank."""
    facts = {rank: facts_of(rank, **own) for rank, own in enumerate((*changes, {}, {})[:2])}
    good: dict[str, Any] = {
        "size": 2,
        "seconds": 30.0,
        "facts": facts,
        "listening": {rank: listening_of(rank, *networks) for rank in facts},
        "paths": {0: (path_to(1),), 1: (path_to(0),)},
    }
    return Job(**{**good, **options})


def bad(found: Job) -> list[Finding]:
    return [each for each in job(found) if each.status != OK]


def test_a_good_job_has_no_warning_and_one_line_for_what_is_equal() -> None:
    findings = job(job_of())
    assert {each.status for each in findings} == {OK}
    assert [each.host for each in findings if each.check == "versions"] == [""]
    values = {each.check: each.value for each in findings}
    assert values["ranks"] == "2 of 2 came"
    assert values["connections"].startswith("2 of 2")


def test_missing_ranks_are_named_with_the_hosts_that_came() -> None:
    [finding] = bad(job_of(size=5, facts={0: facts_of(0, size=5), 3: facts_of(3, size=5)},
                           listening={0: listening_of(0), 3: listening_of(3)},
                           paths={0: (path_to(3),), 3: (path_to(0),)}))  # fmt: skip
    assert finding.status == FAILED
    assert "ranks 1, 2, 4 of 5 did not come within 30 s" in finding.value
    assert "node0 (rank 0), node3 (rank 3)" in finding.value


@pytest.mark.parametrize(
    ("changes", "status", "value"),
    [
        ({"wingbeat": "1.1"}, FAILED, "wingbeat differs: 1.0 on rank 0; 1.1 on rank 1"),
        ({"torch": "2.12"}, FAILED, "torch differs: 2.11.0 on rank 0; 2.12 on rank 1"),
        ({"python": "3.12.1"}, WARNING, "Python differs: 3.11 on rank 0; 3.12 on rank 1"),
        ({"env": {"WINGBEAT_ENCRYPTED": "0"}}, FAILED, "none on rank 0; 0 on rank 1"),
        ({"job": "job 8"}, FAILED, "name of the job differs: job 7 on rank 0; job 8 on rank 1"),
        ({"size": 4}, FAILED, "WORLD_SIZE differs: 2 on rank 0; 4 on rank 1"),
        ({"gpus": 8}, WARNING, "numbers differ: node0 0, node1 8"),
        ({"env": {"LOCAL_WORLD_SIZE": "2"}}, WARNING, "LOCAL_WORLD_SIZE is 2, but 1"),
        ({"hostname": "node0"}, WARNING, "several have the same name"),
    ],
)
def test_what_has_to_be_equal_is_compared(changes: dict[str, Any], status: str, value: str) -> None:
    [finding] = bad(job_of({}, changes))
    assert finding.status == status
    assert value in finding.value
    assert finding.remedy


def test_a_patch_of_python_may_differ() -> None:
    assert bad(job_of({}, {"python": "3.11.9"})) == []


def test_rejected_malformed_and_duplicate_ranks_are_named() -> None:
    facts = {0: facts_of(0, size=3)}
    found = job_of(size=3, facts=facts, listening={}, paths={}, rejected={1: "it has another key"},
                   malformed={2: "torch is missing"},
                   duplicates=[facts_of(0, hostname="node9")])  # fmt: skip
    values = [each.value for each in bad(found)]
    assert any("rank 1: it has another key" in value for value in values)
    assert any("rank 2 sent a malformed value: torch is missing" in value for value in values)
    assert any("two processes have rank 0, on node0 and node9" in value for value in values)
    assert not any("did not come" in value for value in values)


def test_hosts_with_different_numbers_of_processes_are_a_warning() -> None:
    facts = {rank: facts_of(rank, size=3) for rank in range(3)}
    facts[1] = replace(facts[1], host=facts[0].host, hostname="node0")
    found = job_of(size=3, facts=facts, listening={r: listening_of(r) for r in (0, 2)},
                   paths={0: (path_to(2),), 2: (path_to(0),)})  # fmt: skip
    [finding] = bad(found)
    assert "numbers of processes differ: node0 2, node2 1" in finding.value


# -- networks


def nics(**changes: Any) -> dict[str, Any]:
    return {"nics": (Nic(**{"name": "eth0", "speed": 10_000, "mtu": 1500, **changes}),)}


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        (
            nics(mtu=9000),
            "MTU differs in one network: node0 eth0 1500, node1 eth0 9000",
            "mtu 1500",
        ),
        (nics(speed=1000), "speed in Mbit/s differs", "ethtool eth0"),
    ],
)
def test_interfaces_of_a_network_are_alike(
    changes: dict[str, Any], value: str, remedy: str
) -> None:
    [finding] = bad(job_of({}, changes))
    assert finding.status == WARNING
    assert value in finding.value
    assert remedy in finding.remedy


def test_an_unknown_speed_is_not_compared() -> None:
    assert bad(job_of({}, nics(speed=0))) == []


def test_a_nic_that_is_down_on_one_of_two_hosts_is_named() -> None:
    up = (Nic(name="eth0", mtu=1500), Nic(name="eth1", mtu=1500))
    down = (Nic(name="eth0", mtu=1500), Nic(name="eth1", up=False))
    [finding] = bad(job_of({"host": host_of(0, 0, 1), "nics": up}, {"nics": down}))
    assert finding.status == WARNING
    assert "10.1.0.0/24 connects node0 eth1, but not node1 (eth1 is down)" in finding.value
    assert "ip link set eth1 up" in finding.remedy


def test_a_network_of_one_host_is_not_a_warning() -> None:
    found = job_of({"host": host_of(0, 0, 1)}, {})
    assert bad(found) == []
    assert any("10.1.0.0/24, one host only" in each.value for each in job(found))


def test_a_bridge_with_one_address_everywhere_is_not_a_warning() -> None:
    bridge = replace(host_of(0, 5).interfaces[0], name="docker0")
    hosts = [replace(host_of(r), interfaces=(*host_of(r).interfaces, bridge)) for r in range(2)]
    found = job_of(*({"host": host} for host in hosts))
    assert bad(found) == []
    assert any("the same address on several hosts" in each.value for each in job(found))


def test_hosts_without_a_common_network_fail_with_what_to_name() -> None:
    error = "no subnet has an interface of every host (...); name the interfaces: init(...)"
    listening = {0: Listening(error=error), 1: Listening(error=error)}
    [finding] = bad(job_of(listening=listening, paths={}))
    assert finding.status == FAILED
    assert (finding.host, finding.value) == ("", "no subnet has an interface of every host (...)")
    assert "init(...)" in finding.remedy


def test_different_numbers_of_named_interfaces_fail() -> None:
    found = job_of(listening={0: listening_of(0, 0, 1), 1: listening_of(1)})
    assert any("numbers of interfaces differ: node0 2, node1 1" in f.value for f in bad(found))


# -- connections


@pytest.mark.parametrize(
    ("outcome", "detail", "remedy"),
    [
        ("timeout", "no answer within 5.0 s", "firewall on node1"),
        ("refused", "Connection refused", "firewall on node1"),
        ("unreachable", "No route to host", "ip route get 10.0.0.2"),
        ("route", "Network is unreachable", "ip route get 10.0.0.2"),
        ("forbidden", "Operation not permitted", "outgoing"),
        ("handshake", "the peer does not have this job's key", "WINGBEAT_JOB_KEY"),
    ],
)
def test_a_direction_that_fails_is_named_with_its_reason(
    outcome: str, detail: str, remedy: str
) -> None:
    [finding] = bad(job_of(paths={0: (path_to(1, outcome, detail),), 1: (path_to(0),)}))
    assert finding.status == FAILED
    assert f"node0 (10.0.0.1) to node1 (10.0.0.2, eth0): {detail}" in finding.value
    assert remedy in finding.remedy
    if outcome in ("timeout", "refused"):
        assert "the other direction works" in finding.value


def test_braces_in_a_host_name_stay_as_they_are() -> None:
    found = job_of({}, {"hostname": "a{9}b"}, paths={0: (path_to(1, "timeout"),), 1: (path_to(0),)})
    [finding] = bad(found)
    assert "firewall on a{9}b" in finding.remedy


def test_a_host_that_none_reaches_is_one_finding() -> None:
    facts = {rank: facts_of(rank, size=4) for rank in range(4)}
    paths = {
        rank: tuple(
            path_to(peer, "timeout" if peer == 3 else "ok", "no answer" if peer == 3 else "")
            for peer in range(4)
            if peer != rank
        )
        for rank in range(4)
    }
    listening = {rank: listening_of(rank) for rank in range(4)}
    [finding] = bad(job_of(size=4, facts=facts, listening=listening, paths=paths))
    sources = ", ".join(f"node{r} (10.0.0.{r + 1})" for r in range(3))
    assert finding.value.startswith(f"{sources} to node3")


@pytest.mark.parametrize(
    ("way", "value"), [("there", "node0 to node1"), ("back", "node1 to node0")]
)
def test_lost_full_size_packets_are_an_mtu(way: str, value: str) -> None:
    [finding] = bad(job_of(paths={0: (path_to(1, stalled=way, mtu=9000),), 1: (path_to(0),)}))
    assert f"{value} over eth0: small packets arrive, packets of 9000 bytes do not" in finding.value
    assert "mtu" in finding.remedy


def test_both_ends_of_a_lossy_path_are_one_finding() -> None:
    paths = {0: (path_to(1, stalled="there"),), 1: (path_to(0, stalled="back"),)}
    assert len(bad(job_of(paths=paths))) == 1


def test_a_rank_that_reports_no_connections_is_named() -> None:
    [finding] = bad(job_of(paths={0: (path_to(1),)}))
    assert "rank 1 has not reported its connections in time" in finding.value


# -- clocks and buffers


@pytest.mark.parametrize(
    ("paths", "value"),
    [
        ({0: (path_to(1, clock_s=3.2),), 1: ()}, "node1 is 3.200 s ahead of node0"),
        ({0: (), 1: (path_to(0, clock_s=3.2),)}, "node1 is 3.200 s behind node0"),
    ],
)
def test_clocks_that_differ_are_a_warning(paths: Any, value: str) -> None:
    [finding] = bad(job_of(paths=paths))
    assert finding.status == WARNING
    assert value in finding.value
    assert "training does not" in finding.remedy


def test_a_difference_within_the_round_trip_is_no_warning() -> None:
    paths = {0: (path_to(1, clock_s=0.3, round_trip_s=0.55),), 1: ()}
    found = job_of(nics(speed=0), nics(speed=0), paths=paths)
    assert bad(found) == []


def test_the_clock_of_the_shortest_round_trip_counts() -> None:
    paths = {0: (path_to(1, clock_s=0.2, round_trip_s=0.2),), 1: (path_to(0, clock_s=0.0),)}
    assert bad(job_of(nics(speed=0), nics(speed=0), paths=paths)) == []


def test_buffers_smaller_than_speed_times_round_trip_are_a_warning() -> None:
    paths = {0: (path_to(1, round_trip_s=0.02),), 1: (path_to(0),)}
    [finding] = bad(job_of(paths=paths))  # 10 Gbit/s and 20 ms: 25 MB
    assert (finding.check, finding.host) == ("TCP buffers", "node0")
    assert "4096 kB at most, and a link needs 24414 kB" in finding.value
    assert "tcp_rmem='4096 131072 50000000'" in finding.remedy
