"""Lets `wingbeat top` see this process's models; where that cannot be, training goes on without."""

from __future__ import annotations

import threading
import weakref

from wingbeat.monitor import launch
from wingbeat.monitor.place import job_name
from wingbeat.monitor.reporter import Place, Reporter
from wingbeat.observe.log import log
from wingbeat.observe.meter import Meter
from wingbeat.transport.torch_store import keeps_everything
from wingbeat.transport.world import World

_reporters: weakref.WeakKeyDictionary[World, Reporter | None] = weakref.WeakKeyDictionary()
_changing = threading.Lock()


def check_wishes(world: World) -> None:
    """Check what the environment says of how this worker is watched, before anything is changed.

    Raises:
        UsageError: a variable has a value that it cannot have.
    """
    if not world.threads and launch.wanted() and world.rank == 0:
        launch.places()


def watch(world: World, meter: Meter) -> None:
    """Have the model of this meter be reported until its world is closed.

    Args:
        world: all workers. Those that are threads of a test are not reported.
        meter: the model's.

    Raises:
        UsageError: the environment variables that choose this have values that they cannot have.
    """
    if world.threads or not launch.wanted():
        return
    with _changing:
        if world not in _reporters:
            _reporters[world] = _begin(world)
        reporter = _reporters[world]
    if reporter is not None:
        reporter.add(meter)


def _begin(world: World) -> Reporter | None:
    where = launch.places() if world.rank == 0 else None
    store = world.store if world.group_store is None else world.group_store()
    if keeps_everything(store):
        if world.rank == 0:
            log.info("`wingbeat top` cannot show this job: its store is a file, that would grow")
        return None
    supervisor = None
    if where is not None:
        try:
            supervisor = launch.Launched(job_name(), where, log.info)
        except OSError as error:  # no memory, or too many processes
            log.info("`wingbeat top` cannot show this job: %s", error)
    names = tuple(link.name for link in world.links)
    place = Place(world.rank, world.size, names, store)
    try:
        reporter = Reporter(place, supervisor).start()
    except RuntimeError as error:  # too many threads
        log.info("`wingbeat top` cannot show rank %d: %s", world.rank, error)
        if supervisor is not None:
            supervisor.close()
        return None
    world.on_close(reporter.close)
    return reporter
