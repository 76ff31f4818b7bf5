from __future__ import annotations

import pytest

from wingbeat.collectives.program import compile_rounds
from wingbeat.simulator import Links, Work
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.exchange import Lane
from wingbeat.simulator.network import Network, Wires
from wingbeat.topologies import Mesh
from wingbeat.types import Layout, blocks_of

FREE = Work(chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0)


def test_two_that_wait_for_a_late_receiver_share_its_interface() -> None:
    """Each sends 100 bytes, at 100 bytes a second, once rank 0 has room for them."""
    agenda = Agenda()
    links = Links(bytes_per_s=100.0, latency_s=0.0)
    network = Network(agenda, Wires(Layout.even(3, 1), links))
    lanes = [Lane(rank, 0, agenda, network, FREE) for rank in range(3)]
    blocks = blocks_of(300, 3)
    ended: list[float] = []

    def submit(rank: int) -> None:
        program = compile_rounds(Mesh().reduce_scatter(rank, blocks), 100)
        task = lanes[rank].submit(program, 1.0, None)
        if rank == 0:
            task.when_over(lambda: ended.append(agenda.now))

    for rank, when in ((1, 0.0), (2, 0.0), (0, 50.0)):
        agenda.at(when, lambda rank=rank: submit(rank))  # type: ignore[misc]
    agenda.run()
    assert ended == [pytest.approx(52.0)]
