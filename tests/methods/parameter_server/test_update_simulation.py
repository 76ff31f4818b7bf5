"""Workers and servers with an optimizer: any order of events gives the same parameters."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.lossy_network import Faults
from helpers.mail import Clock, Play
from helpers.server_simulation import LARGEST, MIN_WINDOW, FakeNetwork, Job, VirtualMailbox
from helpers.server_update_simulation import UpdateJobSimulation
from wingbeat.methods.parameter_server.protocol import Kind
from wingbeat.methods.parameter_server.server_update import RemoteOptimizer
from wingbeat.methods.parameter_server.slicing import RequestPlanner
from wingbeat.parts import Servers
from wingbeat.transport.messages.frames import Limits
from wingbeat.types import LayerPositions

GAMES = 400
QUICK = 150
"""Interleavings of a block of seeds, and how many `make test` runs."""

BLOCKS = [
    range(QUICK),
    *(
        pytest.param(range(GAMES * block, GAMES * (block + 1)), marks=pytest.mark.slow)
        for block in range(3)
    ),
]


@pytest.mark.parametrize("seeds", BLOCKS)
def test_update_job_in_any_order_gives_same_parameters(seeds: range) -> None:
    checked = 0
    for seed in seeds:
        chance = random.Random(seed)
        job = Job.drawn(chance)
        window = chance.choice([MIN_WINDOW, 2 * MIN_WINDOW])
        network = FakeNetwork(chance, job.workers, window, links=len(job.weights))
        simulation = UpdateJobSimulation(chance, job, network.box, network.move, Clock())
        simulation.play()
        checked += simulation.checked
    assert checked > 2 * len(seeds)


@pytest.mark.parametrize(
    "faults", [Faults(delay=0.05, reorder=True), Faults(drop=0.2, repeat=0.1, delay=0.05)]
)
def test_update_job_with_network_faults_completes(faults: Faults) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        box = lambda n, play=play: VirtualMailbox(play, n)  # noqa: E731
        UpdateJobSimulation(chance, job, box, play.step, play.clock).play()


def test_step_is_sent_only_to_servers_with_slices() -> None:
    """A worker may be an update ahead of another at a server for which it does not wait."""
    submitted: list[tuple[Kind, int]] = []

    def request(kind: Kind, _dtype: str, transfers: Any, _description: str) -> None:
        submitted.extend((kind, each.server) for each in transfers)

    planner = RequestPlanner(Servers(), servers=3, seed=0)
    servers: Any = SimpleNamespace(
        count=3, numbers=range(2, 5), client=SimpleNamespace(request=request)
    )
    remote = RemoteOptimizer(servers, planner)
    planner.set_buckets([10, 20], [0, 1], [False] * 2, LayerPositions((1, 2), 2), 1000)
    remote.step(b"{}", summed=False, unasked=True)
    assert submitted == [(Kind.STEP, 2), (Kind.STEP, 3)]
    remote.barrier()
    assert submitted[2:] == [(Kind.BARRIER, number) for number in (2, 3, 4)]
