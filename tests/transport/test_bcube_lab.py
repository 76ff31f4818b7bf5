"""A world whose switches join only some hosts each: `init` in an emulated BCube."""

from __future__ import annotations

import sys

import pytest

from wingbeat_lab import lab

SCRIPT = """if True:
    import torch, wingbeat
    from wingbeat.collectives import Collectives
    from wingbeat_lab.lab import counters
    torch.set_num_threads(1)
    crossed = wingbeat.init(timeout=60, interfaces=["eth1", "eth0"])
    try:
        Collectives(crossed, "bcube").all_reduce(torch.ones(9)).wait()
    except wingbeat.errors.UsageError as err:
        print(err)
    wingbeat.shutdown()
    world = wingbeat.init(timeout=60)
    print([link.name for link in world.links], world.networks[world.rank])
    for topology in ("ring", "mesh", "doubling", "bcube"):
        buffer = torch.full((50_000,), float(world.rank))
        torch.distributed.barrier()  # nobody passes on what was sent before
        before = counters.read()
        Collectives(world, topology).all_reduce(buffer).wait()
        assert torch.equal(buffer, torch.full((50_000,), 6.0)), topology
        torch.distributed.barrier()
        after = counters.read()
    print(*(after[f"eth{i}"].tx_bytes - before[f"eth{i}"].tx_bytes for i in range(2)))
    if world.rank in (0, 3):  # which share no switch
        with world.open_group(wingbeat.Group((0, 3))) as group:
            buffer = torch.full((9,), float(world.rank))
            Collectives(group).all_reduce(buffer).wait()
            assert buffer.tolist() == [3.0] * 9
    torch.distributed.barrier()
    wingbeat.shutdown()
"""


def run(spec: str) -> dict[int, list[str]]:
    lines: dict[int, list[str]] = {}
    result = lab.run(
        spec,
        [sys.executable, "-c", SCRIPT],
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        timeout=165,
    )
    assert result.exit_code == 0, lines
    return lines


@pytest.mark.slow
@pytest.mark.lab
def test_every_topology_works_in_a_bcube_and_bcube_uses_both_interfaces() -> None:
    """And its own is refused in a world before, whose cards are named in another order."""
    lines = run("bcube:2x2@200mbit")
    for rank, (refused, cards, sent) in lines.items():
        assert "interface 0 is to join the ranks [0, 1]" in refused
        assert cards == (f"['eth0', 'eth1'] ('10.0.{rank // 2}.0/24', '10.1.{rank % 2}.0/24')"), (
            lines
        )
        # 2 (1 - 1/4) / 2 of 200,000 bytes over each, and headers.
        assert all(150_000 < int(nbytes) < 175_000 for nbytes in sent.split()), lines
