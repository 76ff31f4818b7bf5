"""The checks of one host, and of the store, case by case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wingbeat
from helpers.hosts import facts_of
from wingbeat.doctor import checks
from wingbeat.doctor.checks import FAILED, OK, WARNING, Finding
from wingbeat.doctor.facts import Facts, Nic, Reach, collect
from wingbeat.schema import parse_json, to_json
from wingbeat.transport.interfaces import Host

SOURCE = Path(wingbeat.__file__).parent


def found(findings: list[Finding], status: str) -> list[Finding]:
    return [each for each in findings if each.status == status]


def test_a_good_host_has_no_warning() -> None:
    findings = checks.local(facts_of(size=16), 8)
    assert {each.status for each in findings} == {OK}
    assert {each.check for each in findings} >= {"versions", "cores", "NICs", "open files"}


CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"instructions": "portable"}, WARNING, "portable", "-cpu host"),
    ({"can_encrypt": False}, FAILED, "cannot be encrypted", "WINGBEAT_ENCRYPTED=0"),
    ({"cores": 1.5}, WARNING, "1.5 for 1 process", "--cpus-per-task"),
    ({"gpus": 0, "driver": "570.1", "gpu_problem": "torch is built without CUDA"}, WARNING,
     "driver 570.1: torch is built without CUDA", "nvidia-smi"),
    ({"files": 64, "size": 64}, FAILED, "hard limit 64", "ulimit -Hn"),
    ({"files": 256, "size": 64}, WARNING, "hard limit 256", "ulimit -Hn"),
    ({"shm_bytes": 64 << 20}, WARNING, "64 MB", "--shm-size"),
    ({"problems": ("A=b: allowed are 0 and 1",)}, FAILED, "A=b", "allowed are 0 and 1"),
    ({"problems": ("unknown level 'foo' in WINGBEAT_LOG; allowed: debug, off",)}, FAILED,
     "unknown level 'foo' in WINGBEAT_LOG", "allowed are debug, off"),
    ({"env": {"WINGBEAT_TPO": "1"}}, WARNING, "WINGBEAT_TPO is not a variable", "WINGBEAT_TOP"),
    ({"env": {"GLOO_SOCKET_IFNAME": "eth7"}}, FAILED, "eth7 is not up", "up: eth0"),
    ({"env": {"GLOO_SOCKET_IFNAME": "lo"}}, FAILED, "lo is loopback", "unset GLOO"),
    ({"env": {"NCCL_SOCKET_IFNAME": "ib"}}, WARNING, "ib is not up", "unset NCCL"),
    ({"env": {"NCCL_SOCKET_IFNAME": "=et"}, "gpus": 1}, FAILED, "et is not up", "unset NCCL"),
    ({"key": "WINGBEAT_JOB_KEY_FILE", "key_mode": 0o644,
      "env": {"WINGBEAT_JOB_KEY_FILE": "/run/key"}}, WARNING, "/run/key (mode 644)",
     "chmod 600 /run/key"),
    ({"replica_store": Reach(outcome="refused", detail="Connection refused"),
      "env": {"WINGBEAT_STORE": "node9:29400"}}, FAILED, "node9:29400", "wingbeat store"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "status", "value", "remedy"), CASES)
def test_one_thing_that_is_wrong_is_the_only_finding_with_its_remedy(
    changes: dict[str, Any], status: str, value: str, remedy: str
) -> None:
    findings = checks.local(facts_of(**changes), several_hosts=True)
    [each] = [each for each in findings if each.status != OK]
    assert each.status == status
    assert value in each.value
    assert remedy in each.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"NCCL_SOCKET_IFNAME": "^docker0"}},
        {"env": {"NCCL_SOCKET_IFNAME": "eth"}, "gpus": 8},
        {"env": {"WINGBEAT_ENCRYPTED": "0"}, "can_encrypt": False},
        {"files": 0},
        {"key": "WINGBEAT_JOB_KEY_FILE", "key_mode": 0o600},
        {"shared_memory": "memfd_create: Operation not permitted"},  # one process needs none
    ],
)
def test_what_does_not_matter_is_ok(changes: dict[str, Any]) -> None:
    findings = checks.local(facts_of(**changes), several_hosts=True)
    assert [each for each in findings if each.status != OK] == []


def test_several_processes_on_a_host_need_cores_gpus_and_shared_memory() -> None:
    own = facts_of(cores=8.0, gpus=2, driver="570.1", shared_memory="not permitted")
    warned = {each.check for each in found(checks.local(own, 8), WARNING)}
    assert warned == {"cores", "GPUs", "shared memory"}


def test_a_host_without_a_nic_is_warned_and_a_nic_that_is_down_is_listed() -> None:
    nics = (Nic(name="eth0", up=False), Nic(name="eth1"), Nic(name="lo"))
    [lo] = [each for each in facts_of().host.interfaces if each.name == "lo"]
    findings = checks.local(facts_of(nics=nics, host=Host("host", (lo,))))
    [warning] = found(findings, WARNING)
    assert "no NIC" in warning.value
    assert "not used: eth0 (down), eth1 (no address), lo (loopback)" in {f.value for f in findings}


def test_an_invalid_key_is_not_reported_as_none() -> None:
    problem = "WINGBEAT_JOB_KEY has 3 characters: set at least 16"
    findings = checks.local(facts_of(problems=(problem,)))
    assert "job key" not in {each.check for each in findings}


def test_a_misspelled_key_does_not_leave_the_process() -> None:
    env = {"WINGBEAT_JOB_KEY": "k" * 16, "WINGBEAT_JOBKEY": "a secret", "WINGBEAT_TOP": "off"}
    facts = collect(env)
    assert facts.env == {"WINGBEAT_JOBKEY": "", "WINGBEAT_TOP": "off"}
    [warning] = [each for each in checks.local(facts) if "WINGBEAT_JOBKEY" in each.value]
    assert warning.status == WARNING


def test_facts_can_be_read_whatever_the_environment_has() -> None:
    env = {f"WINGBEAT_{n}_SERVICE_HOST": "10.0.0.1" for n in range(300)}  # of Kubernetes
    env |= {f"WINGBEAT_X{n}": "1" for n in range(300)}
    facts = collect(env)
    assert parse_json(Facts, json.dumps(to_json(facts)), "facts") == facts


def test_the_only_variable_that_is_the_key_is_not_reported_as_none() -> None:
    findings = checks.local(facts_of(key="WINGBEAT_JOB_KEY"))
    [own] = [each.value for each in findings if each.check == "environment"]
    assert own == "no WINGBEAT_* variables but WINGBEAT_JOB_KEY"


# -- the store


@pytest.mark.parametrize(
    ("outcome", "remedy"),
    [
        ("timeout", "firewalls"),
        ("refused", "check that rank 0 runs"),
        ("unreachable", "ip route get 10.0.0.1"),
        ("route", "no route"),
        ("name", "getent hosts node0"),
        ("in use", "another MASTER_PORT"),
        ("elsewhere", "set MASTER_ADDR on all workers"),
        ("protocol", "another program answers"),
        ("forbidden", "own firewall"),
        ("error", "check that rank 0 runs"),
    ],
)
def test_each_way_to_miss_the_store_has_its_remedy(outcome: str, remedy: str) -> None:
    reach = Reach(outcome=outcome, detail="what the system reports", address="10.0.0.1")
    finding = checks.store(1, "node0:29500 (MASTER_ADDR, MASTER_PORT)", reach)
    assert finding.status == FAILED
    assert "node0:29500" in finding.value
    assert "what the system reports" in finding.value
    assert remedy in finding.remedy


def test_a_loopback_address_of_the_store_is_named_as_the_reason() -> None:
    reach = Reach(outcome="refused", detail="Connection refused", address="127.0.0.1")
    assert "loopback" in checks.store(1, "localhost:29500", reach, loopback=True).remedy


# -- the report


def test_equal_findings_of_hosts_become_one() -> None:
    one, two = Finding("a", OK, "1", host="h0"), Finding("b", WARNING, "2", "fix", host="h0")
    other = Finding("a", OK, "1", host="h1")
    assert checks.merged([one, two, other], 2) == [
        Finding("a", OK, "1"),
        Finding("b", WARNING, "2", "fix", host="h0"),
    ]
    assert checks.merged([one, other], 3) == [Finding("a", OK, "1", host="h0, h1")]
