"""Workers as threads of one process, without a network, for tests of code that uses wingbeat.

::

    from wingbeat import testing

    results = testing.run(testing.worlds(4), train)  # train(world) in four threads

Only the sockets are replaced: messages are copied between threads.
"""

from __future__ import annotations

from wingbeat.transport.loopback import LoopbackLink, Switchboard, run, worlds

__all__ = ["LoopbackLink", "Switchboard", "run", "worlds"]
