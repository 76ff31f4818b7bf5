"""Hosts that have IPv6 addresses only, and one host that has a card less than the others."""

from __future__ import annotations

import sys

import pytest

from wingbeat_lab import lab

SCRIPT = """if True:
    import os, subprocess, torch, wingbeat
    torch.set_num_threads(1)

    def trained(strategy):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy)
        torch.manual_seed(world.rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).pow(2).mean().backward()
            optimizer.step()
        wingbeat.synchronize(model)
        wingbeat.release(model, optimizer)
        return f"{sum(float(p.detach().double().sum()) for p in model.parameters()):.6f}"

    world = wingbeat.init(timeout=60)
    sums = trained(wingbeat.DeAR(plan="fixed")), trained(wingbeat.Geryon())
    print(*world.networks[world.rank], *sums)
    wingbeat.shutdown()
    del os.environ["GLOO_SOCKET_IFNAME"]  # the lab's, with both cards
    if world.rank == 1:
        subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
    world = wingbeat.init(timeout=60)
    print(*world.networks[world.rank], trained(wingbeat.DeAR(plan="fixed")))
    wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.lab
def test_all_interfaces_between_hosts_carry_gradients_and_server_messages() -> None:
    lines: dict[int, list[str]] = {}
    result = lab.run(
        "star:3x2@200mbit,ip=6",
        [sys.executable, "-c", SCRIPT],
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        timeout=165,
    )
    assert result.exit_code == 0, lines
    both, one = lines[0]
    assert both.split()[:2] == ["fd00::/64", "fd00:0:0:1::/64"]
    assert one.split()[0] == "fd00::/64"
    dear, served = both.split()[2:]
    assert dear == served == one.split()[1]
    assert lines == {rank: [both, one] for rank in range(3)}
