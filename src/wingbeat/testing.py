"""Workers as threads of one process, without a network: for tests of what uses wingbeat.

::

    from wingbeat import testing

    results = testing.run(testing.worlds(4), train)  # train(world) in four threads

What runs is all of wingbeat but the sockets: messages are copied from one thread to another.
"""

from __future__ import annotations

from wingbeat.transport.loopback import LoopbackLink, Switchboard, run, worlds, worlds_on

__all__ = ["LoopbackLink", "Switchboard", "run", "worlds", "worlds_on"]
