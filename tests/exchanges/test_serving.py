"""Workers and servers together: no order of events leaves one waiting, or a sum wrong."""

from __future__ import annotations

import random

import pytest

from helpers.mail import Clock, Play
from helpers.serving import LARGEST, LEAST, Drama, Job, Office, VirtualBox
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.loopback import Faults

GAMES = 2500
"""For each of four seeds: 10,000 interleavings."""


@pytest.mark.parametrize("block", range(4))
def test_whatever_the_order_all_workers_have_all_sums(block: int) -> None:
    checked = 0
    for seed in range(GAMES * block, GAMES * (block + 1)):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        office = Office(chance, job.workers, chance.choice([LEAST, 2 * LEAST]))
        drama = Drama(chance, job, office.box, office.move, Clock())
        drama.play()
        checked += drama.checked
    assert checked > 4 * GAMES


FAULTS = {
    "none": Faults(delay=0.05, reorder=True),
    "lost": Faults(drop=0.2, delay=0.05),
    "repeated": Faults(repeat=0.3, delay=0.05, reorder=True),
    "cut": Faults(cut=0.2, delay=0.05),
    "all": Faults(drop=0.1, repeat=0.1, cut=0.1, delay=0.05, reorder=True),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_whatever_the_network_does_all_workers_have_all_sums(faults: Faults) -> None:
    for seed in range(100):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        drama = Drama(chance, job, lambda n, play=play: VirtualBox(play, n), play.step, play.clock)
        drama.play()
