"""Cases of file descriptors, each in a process that does nothing else; they assert."""

from __future__ import annotations

import os
import resource
from unittest.mock import patch

import pytest
import torch.distributed as dist

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport import descriptors
from wingbeat.transport.messages import connect
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.services import ProcessService
from wingbeat.transport.torch_store import TorchStore


def count() -> int:
    return len(os.listdir(descriptors.FD_DIRECTORY)) - 1


def allow(more: int) -> int:
    """Let this process open ``more`` descriptors; returns the limit. Few were opened and closed."""
    soft = count() + more
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return soft


def lifted_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allow(50)
    descriptors.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def what_fits() -> None:
    fits = allow(10 + descriptors._RESERVED)
    descriptors.require(10, "opening ten")
    with pytest.raises(UsageError) as caught:
        descriptors.require(11, "opening eleven")
    assert str(caught.value).startswith(
        f"opening eleven: too few file descriptors: the limit is {fits} and at least {fits + 1} "
        "are needed; raise the hard limit, ulimit -Hn 1024"
    )


def none_free() -> None:
    allow(0)
    with pytest.raises(UsageError, match="the limit is"):
        descriptors.require(0, "opening nothing")


def gloo_device() -> None:
    before = count()
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    assert count() - before == descriptors.GLOO_DEVICE_DESCRIPTORS
    del device


def carrier(interfaces: int, classes: int) -> None:
    before = count()
    carrier = _native.Carrier(0, 1, 1000, 10_000, 1.0, 60.0, True)
    ports = connect._listen(carrier, ["127.0.0.1"] * interfaces, classes, "opening it")
    assert sum(map(len, ports)) == interfaces * classes
    assert count() - before == connect._CARRIER_DESCRIPTORS + interfaces * classes
    carrier.abandon()


def mailbox() -> None:
    store = TorchStore(dist.HashStore())
    allow(6)
    with pytest.raises(
        UsageError, match="rank 0: opening a mailbox in namespace 'few': too few file"
    ):
        open_mailbox(store, 0, [1], namespace="few", seconds=1.0)


def mailbox_after_the_check(free: int) -> None:
    """The carrier finds no descriptor, or its sockets."""
    with (
        patch.object(descriptors, "require", lambda *_: allow(free)),
        pytest.raises(UsageError, match=r"too few file descriptors: the limit is \d+ and"),
    ):
        open_mailbox(TorchStore(dist.HashStore()), 0, [1], namespace="few", seconds=1.0)


def service() -> None:
    class Config:
        me = "the service"

    allow(6)
    with pytest.raises(UsageError, match="starting the service: too few file descriptors"):
        ProcessService(Config(), TorchStore(dist.HashStore()))  # type: ignore[arg-type]
