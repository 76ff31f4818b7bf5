"""Too few file descriptors are refused in one line, before gloo would abort."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import descriptor_cases as cases
import pytest

from helpers.pool import Pool
from helpers.ports import free_port


@pytest.fixture
def alone() -> Iterator[Pool]:
    """A process of its own: threads of earlier tests close descriptors of this one at any time."""
    pool = Pool(1, default_group=False)
    yield pool
    pool.close()


CASES = {
    "limit lifted": (cases.lifted_limit,),
    "what fits": (cases.what_fits,),
    "none free": (cases.none_free,),
    "gloo device": (cases.gloo_device,),
    **{
        f"carrier {interfaces} x {classes}": (cases.carrier, interfaces, classes)
        for interfaces in (1, 2)
        for classes in (1, 3)
    },
    "mailbox": (cases.mailbox,),
    "mailbox after the check, carrier": (cases.mailbox_after_the_check, 0),
    "mailbox after the check, sockets": (cases.mailbox_after_the_check, 2),
    "service": (cases.service,),
}
"""Those of `descriptor_cases`, which assert."""


@pytest.mark.parametrize("name", CASES)
def test_few_descriptors_are_counted_and_refused(alone: Pool, name: str) -> None:
    case, *args = CASES[name]
    alone.run(case, *args)


TRAIN = """
import sys, torch, wingbeat
from wingbeat.strategies import parse
world = wingbeat.init(timeout=10)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = wingbeat.distribute(model, optimizer, parse(sys.argv[1]))
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
wingbeat.shutdown()
print("trained")
"""
ENDED = re.compile(r"^(?:\[rank\d\]: )?wingbeat\.errors\.\w+: (.*)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "most", "trains"),
    [
        ("allreduce", 24, False),
        ("allreduce", 64, True),
        ("canary", 32, False),
        ("adpsgd", 32, False),
        ("ripples", 36, False),
        ("ripples", 96, True),
    ],
)
def test_ranks_with_few_descriptors_train_or_end_with_one_line(
    strategy: str, most: int, trains: bool
) -> None:
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    ranks = [
        subprocess.Popen(
            ["prlimit", f"--nofile={most}:{most}", sys.executable, "-c", TRAIN, strategy],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=120)[0] for each in ranks]
    if trains:
        assert [each.returncode for each in ranks] == [0, 0], said
        return
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode in (1, 2), text
        assert len(ENDED.findall(text)) == 1, text
    assert any("too few file descriptors: the limit is" in text for text in said), said
