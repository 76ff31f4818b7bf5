"""Workers and servers that update: no order of events leaves one waiting, or a parameter wrong."""

from __future__ import annotations

import random

import pytest

from helpers.mail import Clock, Play
from helpers.server_simulation import LARGEST, LEAST, Job, Office, VirtualBox
from helpers.server_update_simulation import UpdateDrama
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.loopback import Faults

GAMES = 400


@pytest.mark.parametrize("block", range(3))
def test_whatever_the_order_all_workers_have_the_new_parameters(block: int) -> None:
    checked = 0
    for seed in range(GAMES * block, GAMES * (block + 1)):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        window = chance.choice([LEAST, 2 * LEAST])
        office = Office(chance, job.workers, window, links=len(job.weights))
        drama = UpdateDrama(chance, job, office.box, office.move, Clock())
        drama.play()
        checked += drama.checked
    assert checked > 2 * GAMES


@pytest.mark.parametrize(
    "faults", [Faults(delay=0.05, reorder=True), Faults(drop=0.1, repeat=0.1, cut=0.1, delay=0.05)]
)
def test_whatever_the_network_does(faults: Faults) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        box = lambda n, play=play: VirtualBox(play, n)  # noqa: E731
        UpdateDrama(chance, job, box, play.step, play.clock).play()
