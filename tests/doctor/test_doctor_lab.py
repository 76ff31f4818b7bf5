"""``wingbeat doctor`` on emulated hosts whose network has one fault each."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.code_blocks import ROOT, blocks_of, run_in_lab
from wingbeat_lab import lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

DOCTOR = f"exec {sys.executable} -m wingbeat doctor"
UNNAMED = "unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"
"""The lab names its interfaces; of a host with an interface less that would be a failure too."""

DROP_SYN = """
tc qdisc del dev eth0 root
tc qdisc add dev eth0 root handle 1: htb default 10
tc class add dev eth0 parent 1: classid 1:10 htb rate 1gbit
tc class add dev eth0 parent 1: classid 1:20 htb rate 1gbit
tc qdisc add dev eth0 parent 1:20 handle 20: pfifo limit 0
tc filter add dev eth0 parent 1: protocol ip u32 match ip protocol 6 0xff \
  match u8 0x02 0x12 at 33 flowid 1:20
"""
"""Lose each packet that opens a connection from this host, and no answer: as a firewall does."""


@dataclass
class Examined:
    """The exit codes, the report of rank 0, and the lines of each rank."""

    codes: tuple[int, ...]
    findings: list[dict[str, str]]
    lines: dict[int, list[str]]

    def bad(self) -> list[dict[str, str]]:
        return [each for each in self.findings if each["status"] != "ok"]


def examined(
    folder: Path, spec: str, *faults: str, timeout: float = 20.0, arguments: str = ""
) -> Examined:
    """Run the command with a shell line before it on each host."""
    report = folder / "report.json"
    cases = "\n".join(f"{rank}) {fault or ':'} ;;" for rank, fault in enumerate(faults))
    command = f"{DOCTOR} --timeout {timeout:g} --json {report} {arguments}"
    script = f"set -e\ncase $RANK in\n{cases}\nesac\n{command}"
    lines: dict[int, list[str]] = {}
    result = lab.run(
        spec,
        ["sh", "-c", script],
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        timeout=150,
        grace=60,
    )
    found = json.loads(report.read_text())["findings"] if report.exists() else []
    return Examined(result.exit_codes, found, lines)


def test_command_of_troubleshooting_md_checks_all_hosts(tmp_path: Path) -> None:
    page = ROOT / "docs/how-to/troubleshooting.md"
    [block] = [each for each in blocks_of(page) if each.word("elsewhere")]
    done, said = run_in_lab(block, "star:2@1gbit", tmp_path, 150)
    assert done.exit_code == 0, said
    assert "wingbeat doctor: 2 hosts, 2 ranks" in said
    assert "0 failed" in said


def test_hosts_that_work_have_no_warning(tmp_path: Path) -> None:
    done = examined(tmp_path, "star:2x2@1gbit")
    assert (done.codes, done.bad()) == ((0, 0), []), done
    [connections] = [each for each in done.findings if each["check"] == "connections"]
    assert connections["value"].startswith("4 of 4, each direction of each pair of hosts over eth0")
    assert 1 not in done.lines


def test_rates_are_measured_on_request(tmp_path: Path) -> None:
    done = examined(tmp_path, "star:2@100mbit", arguments="--measure")
    assert done.codes == (0, 0), done
    rates = [each["value"] for each in done.findings if each["check"] == "rates"]
    assert [each.split(",")[0] for each in rates] == ["h0 h0", "h1 h1"]
    assert all("Gbit/s" in each for each in rates)


def test_a_firewall_that_drops_one_direction_is_named(tmp_path: Path) -> None:
    done = examined(tmp_path, "star:2@1gbit", DROP_SYN)
    assert done.codes == (1, 1), done
    [finding] = done.bad()
    assert "h0 (10.0.0.1) to h1 (10.0.0.2, eth0): no answer within" in finding["value"]
    assert finding["value"].endswith("the other direction works")
    assert "firewall on h1" in finding["remedy"]


def test_a_wrong_route_is_named_by_the_rank_that_has_it(tmp_path: Path) -> None:
    done = examined(tmp_path, "star:2@1gbit", "", "ip route add unreachable 10.0.0.1", timeout=8)
    assert done.codes == (1, 1), done
    [finding] = done.bad()
    assert "rank 1 of 2 did not come within 4 s; these came: h0 (rank 0)" in finding["value"]
    text = "\n".join(done.lines[1])
    assert "rank 1 did not reach 10.0.0.1:" in text
    assert "No route to host" in text
    assert "ip route get 10.0.0.1" in text


def test_a_switch_with_a_smaller_mtu_than_the_hosts_is_found(tmp_path: Path) -> None:
    large = "ip link set dev eth0 mtu 9000 gso_max_segs 1"
    done = examined(tmp_path, "star:2@1gbit", large, large)
    assert done.codes == (1, 1), done
    values = [each["value"] for each in done.bad()]
    assert any("packets of 9000 bytes do not" in value for value in values)
    assert all(each["check"] == "connections" for each in done.bad())


def test_a_smaller_mtu_on_one_host_is_a_warning(tmp_path: Path) -> None:
    done = examined(tmp_path, "star:2@1gbit", "", "ip link set dev eth0 mtu 1400")
    assert done.codes == (0, 0), done
    [finding] = done.bad()
    assert finding["value"].endswith("h0 eth0 1500, h1 eth0 1400")


def test_an_interface_that_is_down_is_named(tmp_path: Path) -> None:
    down = f"{UNNAMED}; ip link set dev eth1 down"
    done = examined(tmp_path, "star:2x2@1gbit", UNNAMED, down)
    assert done.codes == (0, 0), done
    [finding] = done.bad()
    assert "but not h1 (eth1 is down)" in finding["value"]


def test_a_host_whose_only_interface_is_down_reports_it(tmp_path: Path) -> None:
    done = examined(tmp_path, "star:2@1gbit", "", "ip link set dev eth0 down", timeout=8)
    assert done.codes == (1, 1), done
    text = "\n".join(done.lines[1])
    assert "no NIC is up and has an address" in text
    assert "Network is unreachable" in text


def test_another_job_key_is_named(tmp_path: Path) -> None:
    other = "export WINGBEAT_JOB_KEY=0123456789abcdef"
    done = examined(tmp_path, "star:2@1gbit", "", other)
    assert done.codes == (1, 1), done
    [finding] = done.bad()
    assert finding["value"] == "rank 1: it has another job key than rank 0, or none"
    assert "rank 0 has another job key" in "\n".join(done.lines[1])
