"""Workers as threads of one process, without a network: for tests of code that uses wingbeat.

::

    from wingbeat import testing

    results = testing.run(testing.worlds(4), train)  # train(world) in four threads

Everything but the sockets is real: messages are copied from one thread to another.
"""

from __future__ import annotations

from wingbeat.transport.loopback import LoopbackLink, Switchboard, run, worlds, worlds_on

__all__ = ["LoopbackLink", "Switchboard", "run", "worlds", "worlds_on"]
