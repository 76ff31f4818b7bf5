"""Workers that may be killed and started again alone: three processes of a script, or threads."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

from wingbeat.methods.model_averaging.client import Client
from wingbeat.methods.model_averaging.group_averager import GroupSession
from wingbeat.transport.world import World


def start(script: str, rank: int, port: int, *args: object) -> subprocess.Popen[str]:
    """Start a worker, whose lines are to be read from its standard output."""
    named = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        env={**os.environ, **named, "MASTER_PORT": str(port), "WINGBEAT_TOP": "off"},
        stdout=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """Yield what it says: a word, and the rest of the line."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line.split(maxsplit=1)


def made(said: Iterator[list[str]], steps: int) -> int:
    """Read until a worker has made so many steps; return how many."""
    return next(int(n) for what, n in said if what == "made" and int(n) >= steps)


def again(world: World) -> World:
    """What a process has that was started again in the place of another."""
    return dataclasses.replace(world, returned=True)


def dies(session: GroupSession) -> None:
    """End as a process that is killed between two steps."""
    session.reducer.close()
    assert isinstance(session.client, Client)
    session.client.leave()
    session.client.mailbox.abandon()
