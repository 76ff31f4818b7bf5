"""Workers and servers together: any order of events gives complete sums without deadlock."""

from __future__ import annotations

import random

import pytest

from helpers.lossy_network import Faults
from helpers.mail import Clock, Play
from helpers.server_simulation import (
    LARGEST,
    ONE_SLICE_WINDOW,
    SLICE,
    FakeNetwork,
    Job,
    JobSimulation,
    VirtualMailbox,
)
from wingbeat.methods.parameter_server.protocol import Order
from wingbeat.methods.parameter_server.slicing import partition_buckets
from wingbeat.transport.messages import frames
from wingbeat.transport.messages.frames import Limits

GAMES = 2500
QUICK = 400
"""Interleavings of a block of seeds, and how many `make test` runs."""

BLOCKS = [
    range(QUICK),
    *(
        pytest.param(range(GAMES * block, GAMES * (block + 1)), marks=pytest.mark.slow)
        for block in range(4)
    ),
]


@pytest.mark.parametrize("seeds", BLOCKS)
def test_job_in_any_order_gives_all_sums(seeds: range) -> None:
    checked = held_back = 0
    for seed in seeds:
        chance = random.Random(seed)
        job = Job.drawn(chance)
        window = chance.choice([ONE_SLICE_WINDOW, ONE_SLICE_WINDOW + 2 * SLICE])
        network = FakeNetwork(chance, job.workers, window, SLICE, len(job.weights))
        simulation = JobSimulation(chance, job, network.box, network.move, Clock())
        simulation.play()
        checked += simulation.checked
        held_back += simulation.held_back > 0
    assert checked > 4 * len(seeds)
    assert held_back > len(seeds) // 20, "windows are so small that who is ahead has to wait"


def test_job_with_slow_rank_0_limits_server_memory_to_windows() -> None:
    """However much the others have pushed; and all goes on when it comes."""
    sizes, window = (400,) * 4, frames.MAX_HEADER_BYTES + 1000
    job = Job(3, 1, 1, sizes, 2, partition_buckets(sizes, 1, 100), Order.READY, ready=True)
    for seed in range(20):
        chance = random.Random(seed)
        network = FakeNetwork(chance, job.workers, window)
        simulation = JobSimulation(chance, job, network.box, network.move, Clock())
        begun = {rank: simulation.act(rank) for rank in (1, 2)}
        for act in begun.values():
            for _ in sizes:
                next(act)
        for _ in range(500):
            network.move()
            simulation.step(chance.randrange(1, 4))
        assert simulation.waiting(0) == 2 * 2 * 400, "two slices of each, of sixteen"
        simulation.play(begun=begun)
        assert simulation.checked == 3 * 2 * len(sizes)


FAULTS = {
    "none": Faults(delay=0.05, reorder=True),
    "lost": Faults(drop=0.2, delay=0.05),
    "repeated": Faults(repeat=0.3, delay=0.05, reorder=True),
    "all": Faults(drop=0.2, repeat=0.1, delay=0.05, reorder=True),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_job_with_network_faults_gives_all_sums(faults: Faults) -> None:
    """And those that came twice are counted."""
    repeated = 0
    for seed in range(100):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        simulation = JobSimulation(
            chance, job, lambda n, play=play: VirtualMailbox(play, n), play.step, play.clock
        )
        simulation.play()
        assert {reason for end in play.ends for reason in end.refused} <= {"replayed"}
        repeated += sum(end.repeated for end in play.ends)
    assert repeated or not faults.repeat
