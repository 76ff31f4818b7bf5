"""Workers and servers with an optimizer: any order of events gives the same parameters."""

from __future__ import annotations

import random

import pytest

from helpers.lossy_network import Faults
from helpers.mail import Clock, Play
from helpers.server_simulation import LARGEST, MIN_WINDOW, FakeNetwork, Job, VirtualMailbox
from helpers.server_update_simulation import UpdateJobSimulation
from wingbeat.transport.messages.endpoint import Limits

GAMES = 400


@pytest.mark.parametrize("block", range(3))
def test_update_job_in_any_order_gives_same_parameters(block: int) -> None:
    checked = 0
    for seed in range(GAMES * block, GAMES * (block + 1)):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        window = chance.choice([MIN_WINDOW, 2 * MIN_WINDOW])
        network = FakeNetwork(chance, job.workers, window, links=len(job.weights))
        simulation = UpdateJobSimulation(chance, job, network.box, network.move, Clock())
        simulation.play()
        checked += simulation.checked
    assert checked > 2 * GAMES


@pytest.mark.parametrize(
    "faults", [Faults(delay=0.05, reorder=True), Faults(drop=0.1, repeat=0.1, cut=0.1, delay=0.05)]
)
def test_update_job_with_network_faults_completes(faults: Faults) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        box = lambda n, play=play: VirtualMailbox(play, n)  # noqa: E731
        UpdateJobSimulation(chance, job, box, play.step, play.clock).play()
