"""Too few file descriptors are refused in one line, before gloo would abort."""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from helpers.ports import free_port
from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport import descriptors
from wingbeat.transport.gloo import open_device
from wingbeat.transport.messages import connect
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.services import ProcessService
from wingbeat.transport.torch_store import TorchStore


@pytest.fixture
def limit() -> Iterator[None]:
    """The soft limit is as before, afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def count() -> int:
    return len(os.listdir(descriptors.FD_DIRECTORY)) - 1


def allow(more: int) -> int:
    """Let this process open ``more`` descriptors; returns the limit. Few were opened and closed."""
    gc.collect()  # earlier tests' sockets
    soft = count() + more
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return soft


def test_raise_limit_lifts_soft_to_hard(limit: None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allow(50)
    descriptors.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_require_accepts_what_fits_and_names_limit_and_need_otherwise(limit: None) -> None:
    fits = allow(10 + descriptors._RESERVED)
    descriptors.require(10, "opening ten")
    with pytest.raises(UsageError) as caught:
        descriptors.require(11, "opening eleven")
    assert str(caught.value).startswith(
        f"opening eleven: too few file descriptors: the limit is {fits} and at least {fits + 1} "
        "are needed; raise the hard limit, ulimit -Hn 1024"
    )


def test_require_without_any_free_descriptor_is_refused(limit: None) -> None:
    allow(0)
    with pytest.raises(UsageError, match="the limit is"):
        descriptors.require(0, "opening nothing")


def test_gloo_device_opens_the_stated_number() -> None:
    before = count()
    device = open_device("127.0.0.1")
    assert count() - before == descriptors.GLOO_DEVICE_DESCRIPTORS
    del device


@pytest.mark.parametrize("interfaces", [1, 2])
@pytest.mark.parametrize("classes", [1, 3])
def test_carrier_opens_the_stated_number(interfaces: int, classes: int) -> None:
    before = count()
    carrier = _native.Carrier(0, 1, 1000, 10_000, 1.0, 60.0, True)
    ports = connect._listen(carrier, ["127.0.0.1"] * interfaces, classes, "opening it")
    assert sum(map(len, ports)) == interfaces * classes
    assert count() - before == connect._CARRIER_DESCRIPTORS + interfaces * classes
    carrier.abandon()


def test_mailbox_without_descriptors_is_refused(limit: None) -> None:
    store = TorchStore(dist.HashStore())
    allow(6)
    with pytest.raises(
        UsageError, match="rank 0: opening a mailbox in namespace 'few': too few file"
    ):
        open_mailbox(store, 0, [1], namespace="few", seconds=1.0)


@pytest.mark.parametrize("free", [0, 2])  # for the carrier, and for its sockets
def test_mailbox_that_finds_no_descriptor_after_the_check_is_refused(
    free: int, limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "require", lambda *_: allow(free))
    with pytest.raises(UsageError, match=r"too few file descriptors: the limit is \d+ and"):
        open_mailbox(TorchStore(dist.HashStore()), 0, [1], namespace="few", seconds=1.0)


def test_service_without_descriptors_is_not_started(limit: None) -> None:
    class Config:
        me = "the service"

    allow(6)
    with pytest.raises(UsageError, match="starting the service: too few file descriptors"):
        ProcessService(Config(), TorchStore(dist.HashStore()))  # type: ignore[arg-type]


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
