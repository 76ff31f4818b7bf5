"""The executors of each world: one thread per link, shared by all collectives in it."""

from __future__ import annotations

import os
import threading
import weakref

from wingbeat.collectives.executor import Executor
from wingbeat.collectives.failure import Failure
from wingbeat.collectives.in_turn import InTurn
from wingbeat.collectives.threads import Threads
from wingbeat.transport.world import World

_threads = Threads("wingbeat-group")
turning = Threads("wingbeat-factors")
"""For what is done between the two sums of factors."""
decoding = InTurn(Threads("wingbeat-decode"))
"""For payloads of all workers, which are decoded beside backward."""
_making = threading.RLock()
"""Two threads may make `Collectives` of one world at once; the collector may run in one of them."""


def _after_fork() -> None:
    """Start anew in a forked child: it has no threads, and another may have held the lock."""
    global _making
    _making = threading.RLock()
    _threads.forget()
    turning.forget()
    decoding.forget()


os.register_at_fork(after_in_child=_after_fork)

_executors: weakref.WeakKeyDictionary[World, list[Executor]] = weakref.WeakKeyDictionary()


def executors_of(world: World) -> list[Executor]:
    """One thread per link, shared by everything in this world: collectives keep their order.

    Groups come and go; theirs have a thread only while something is under way.
    """
    with _making:
        if world not in _executors:
            threads = None if world.group is None else _threads
            failure = Failure()
            lanes = range(len(world.links))
            executors = [Executor(world, lane, failure, threads) for lane in lanes]
            _executors[world] = executors
            for executor in executors:
                world.on_close(executor.close)
                # A model that its user has dropped takes its channel along, but not the thread.
                weakref.finalize(world, executor.stop)
        return _executors[world]
