"""``docs/how-to/servers.md``: its queues send marked packets before all others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/how-to/servers.md"

NETWORK = """
ip link add eth0 type veth peer name eth1
ip address add 10.9.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:01 dev eth0
"""

SEND = """
import socket, sys
for mark, packets in ((0xB8, 3), (0, 5)):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, mark)
        for _ in range(packets):
            sender.sendto(b"gradient", ("10.9.0.2", 9))
"""


@pytest.mark.lab
def test_queues_of_the_page_put_ef_into_the_first_class() -> None:
    (queues,) = re.findall(
        r"elsewhere=\S+ -->\n```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    script = (
        f"{NETWORK}{queues}\necho ----\n{sys.executable} -c '{SEND}'\n"
        "tc -statistics class show dev eth0\n"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "bash", "-eu", "-c", script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = done.stdout.split("----")[1]
    packets = dict(re.findall(r"class htb (\S+) .*?Sent \d+ bytes (\d+) pkt", shown, re.DOTALL))
    assert int(packets["1:1"]) == 3
    assert int(packets["1:2"]) >= 5
    assert "prio 0" in shown.split("class htb 1:1 ")[1].splitlines()[0]
