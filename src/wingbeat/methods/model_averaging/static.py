"""The static schedule: groups that follow from the step alone (Ripples, section 4.2).

Figs. 9 and 10 have 4 hosts of 4 workers. Their rules, for any number of workers L of a host:

===== ================================ ============================== =========================
phase local worker 0                   local worker 1                 the others
===== ================================ ============================== =========================
0     with local workers 0 everywhere  with nobody                    with one another
1     with its whole host              with its whole host            with their whole host
2     with local workers 3, 4, ...     with the one of another host   2 with nobody, 3... with 0
3     with its whole host              with its whole host            with their whole host
===== ================================ ============================== =========================

Of three workers of a host, the last takes local worker 3's part in phase 2; a host's only worker
takes local worker 1's there. The other host is the *opposite on the ring*, half the hosts further
on. Of an odd number of hosts one has no opposite, each time the next one.

Nobody has to be asked, and groups of one step never overlap. But who is with whom depends on the
step, which the convergence proof of AD-PSGD, the paper's third condition, forbids (section 4.3);
and one slow worker holds up all.
"""

from __future__ import annotations

from collections.abc import Iterator

from wingbeat.methods.model_averaging.layout import Layout

PHASES = 4
"""Steps after which the schedule repeats, on an even number of hosts."""


def group_of(layout: Layout, worker: int, step: int) -> tuple[int, ...]:
    """Return the group of ``worker`` in a step, in ascending order: ``(worker,)`` if with nobody.

    >>> group_of(Layout.even(hosts=4, workers=4), worker=5, step=2)
    (5, 13)
    """
    host = layout.host_of[worker]
    local = layout.hosts[host]
    match step % PHASES:
        case 0:
            return _phase_0(layout, local, worker)
        case 2:
            return _phase_2(layout, host, worker, step // PHASES)
    return local


def groups_in(layout: Layout, step: int) -> Iterator[tuple[int, ...]]:
    """Yield all groups of a step that have two members at least."""
    for worker in range(layout.workers):
        group = group_of(layout, worker, step)
        if worker == group[0] and len(group) > 1:
            yield group


def _phase_0(layout: Layout, local: tuple[int, ...], worker: int) -> tuple[int, ...]:
    if worker == local[0]:
        return tuple(sorted(workers[0] for workers in layout.hosts))
    return (worker,) if worker == local[1] else local[2:]


def _phase_2(layout: Layout, host: int, worker: int, cycle: int) -> tuple[int, ...]:
    local = layout.hosts[host]
    if worker == _outgoing(local):
        other = _opposite(host, len(layout.hosts), cycle)
        return tuple(sorted({worker, _outgoing(layout.hosts[other])}))
    staying = local[:1] + (local[3:] or local[2:])
    return staying if worker in staying else (worker,)


def _outgoing(local: tuple[int, ...]) -> int:
    """Return the worker of a host that meets the opposite host."""
    return local[1] if len(local) > 1 else local[0]


def _opposite(host: int, hosts: int, cycle: int) -> int:
    """Return the host half a ring away; the host itself if it has none in this cycle."""
    half = hosts // 2
    # With an odd number half a ring there and half a ring back is not the same host. So pairs are
    # counted from another host in each cycle, and the last one is left over.
    first = cycle % hosts if hosts % 2 else 0
    place = (host - first) % hosts
    if place >= 2 * half:
        return host
    return (first + (place + half) % (2 * half)) % hosts
