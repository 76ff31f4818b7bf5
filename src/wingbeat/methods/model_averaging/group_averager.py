"""Averages with groups in the background, and the transfer of state to restarted workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.methods.model_averaging.client import Client
from wingbeat.methods.model_averaging.followers import Call, Channel, Follower, Leader
from wingbeat.methods.model_averaging.group_all_reduce import GroupAllReduce, ModelCompression
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.methods.model_averaging.static_client import StaticClient, StatusTable
from wingbeat.observe.meter import Cell, Section
from wingbeat.transport import failures, graceful_shutdown
from wingbeat.transport.graceful_shutdown import departures_of
from wingbeat.transport.services import ProcessService, Service, ThreadService
from wingbeat.transport.text import first_line
from wingbeat.types import SERIES, Group, Span

if TYPE_CHECKING:
    from wingbeat.transport.link import Link
    from wingbeat.transport.world import World

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 20
"""Bytes of a state that are sent at a time, each chunk with the full timeout."""

_TAG = 0
_CHECK_S = 0.1
_NO_STATE = -1  # sent instead of a size if there is no state

_STATE_FACTOR, _STATE_EXTRA = 8, 64 << 20
"""Limit of a state: a multiple of the parameters' bytes, plus a constant."""


class StateSender:
    """Sends states to other workers, each in a thread, while training continues."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._running: dict[threading.Thread, World] = {}

    def send(self, receiver: int, connection: int, state: bytes | None) -> None:
        """Start sending a state to a worker; None if there is none."""
        self._running = {thread: w for thread, w in self._running.items() if thread.is_alive()}
        inner = self._world.open_group(Group((self._world.rank, receiver), epoch=connection))
        thread = threading.Thread(
            target=_send_state, args=(inner, state), name="wingbeat-send-state", daemon=True
        )
        self._running[thread] = inner
        thread.start()

    def close(self) -> None:
        """Cancel all transfers; receivers request the state from another worker."""
        for thread, inner in self._running.items():
            for link in inner.links:
                link.close()
            thread.join()
        self._running.clear()


def _send_state(inner: World, state: bytes | None) -> None:
    with contextlib.suppress(RuntimeError, WingbeatError), inner:  # the receiver reports errors
        link, peer = inner.links[0], 1 - inner.rank
        size = torch.tensor([_NO_STATE if state is None else len(state)], device="cpu")
        # torch warns about tensors that share the memory of immutable bytes.
        for part in (size, *_chunks(bytearray(state or b""))):
            link.send(part, peer, _TAG).wait(inner.timeout)
        _receive(link, peer, torch.zeros(1, dtype=torch.int64, device="cpu"), inner.timeout)


class _StateReceiver(threading.Thread):
    """Receives a state; ``error`` states how the sender was lost, and ``state`` is then None."""

    def __init__(self, inner: World, limit: int) -> None:
        super().__init__(name="wingbeat-receive-state", daemon=True)
        self._inner, self._limit = inner, limit
        self.size, self.error = 0, ""
        self.state: bytearray | None = None

    def run(self) -> None:
        link, peer, timeout = self._inner.links[0], 1 - self._inner.rank, self._inner.timeout
        try:
            size = torch.zeros(1, dtype=torch.int64, device="cpu")
            _receive(link, peer, size, timeout)
            self.size = int(size)
            state = bytearray(self.size if 0 < self.size <= self._limit else 0)
            for chunk in _chunks(state):
                _receive(link, peer, chunk, timeout)
            if len(state) == max(0, self.size):
                link.send(size, peer, _TAG).wait(timeout)
            self.state = state
        except (RuntimeError, MemoryError, WingbeatError) as error:
            self.error = first_line(error)


def receive_state(
    world: World, sender: int, connection: int, limit: int, is_active: Callable[[], bool]
) -> bytearray | None:
    """Receive the state that ``sender`` sends; None if it was lost.

    Raises PeerError if the sender has no state, or it is too large.
    """
    inner = world.open_group(Group((world.rank, sender), epoch=connection))
    receiver, begun = _StateReceiver(inner, limit), time.monotonic()
    receiver.start()
    try:
        while receiver.is_alive():
            receiver.join(_CHECK_S)
            if not is_active():
                break
    finally:
        if receiver.is_alive():
            for link in inner.links:
                link.close()
            receiver.join()
        inner.close()
    name = f"{world.me}: {world.name(sender)}"
    if receiver.state is None:
        _log.warning(
            "%s was lost %.1f s after it was asked for its state: %s; another one is asked",
            name, time.monotonic() - begun, receiver.error,
        )  # fmt: skip
    elif receiver.size == _NO_STATE:
        raise PeerError(
            f"{name} has no training state for a worker that rejoins; start all workers again from "
            "a checkpoint"
        )
    elif not 0 <= receiver.size <= limit:
        raise PeerError(
            f"{name} sends a state of {receiver.size} bytes: allowed are {limit}; start all "
            "workers again from a checkpoint"
        )
    return receiver.state


def _chunks(state: bytearray) -> Iterator[torch.Tensor]:
    if state:
        yield from torch.frombuffer(state, dtype=torch.uint8).split(_CHUNK_BYTES)


def _receive(link: Link, peer: int, tensor: torch.Tensor, timeout: float) -> None:
    link.recv(tensor, peer, _TAG).wait(timeout)


class GroupSession:
    """Connects a flat buffer to the groups that average it. Rank 0 starts the first generator.

    All workers make a session at the same time, or when they were restarted. The buffer has all
    parameters: flat, contiguous, on the CPU. ``rules`` are the same on all workers; None selects
    the static schedule, which needs no generator. ``encrypted`` covers messages to the generator,
    not parameters.

    Attributes:
        snapshot: returns the state for a restarted worker, between two steps; None for no state.
            See `fetch_state`.

    Raises:
        UsageError: the generator cannot be started, or no process can rejoin.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        rules: Rules | None,
        *,
        compression: ModelCompression | None = None,
        seed: int = 0,
        encrypted: bool = True,
    ) -> None:
        self._world, self._departures = world, departures_of(world)
        self.snapshot: Callable[[], bytes | None] | None = None
        self._limit = _STATE_FACTOR * buffer.numel() * buffer.element_size() + _STATE_EXTRA
        self._sender = StateSender(world)
        self._service: Service | None = None
        serial = world.next_series()
        room, self._closed = f"groups{serial}", False
        self.reducer = GroupAllReduce(world, buffer, compression, first=(serial - 1) * SERIES)
        self._leader: Leader | None = None
        self._channel: Channel | None = None
        self.client: Client | StaticClient | Follower
        if world.replica is not None:
            self._channel = Channel(world, room, encrypted=encrypted)
            if world.replica.leader != world.ranks[world.rank]:
                self.client = Follower(self._channel, self.reducer)
                self.client.on_fetch = self._send_state
                return
            self._leader = Leader(self._channel, self.reducer)
        try:
            if rules is None:
                self.client = self._static_client(room)
            else:
                self.client = self._generators_client(room, rules, seed, encrypted)
        except BaseException as error:
            if self._channel is not None:
                self._channel.tell_error(error)
                self._channel.close(quick=False)
            raise

    def _static_client(self, room: str) -> StaticClient:
        world = self._world
        if world.returned:
            raise UsageError(
                f"{world.name_of(world.rank)} was started again while the others continue: the "
                "static schedule has no rejoin; use Rules(), or start all workers again"
            )
        table = StatusTable(world.store, room, world.size, world.rank)
        client = StaticClient(
            world.rank, world.layout, world.timeout, table, is_running=self._is_running,
            name=world.name_of,
        )  # fmt: skip
        client.on_lost = self._departures.lost
        if self._leader is not None:
            client.watch = self._leader.watch
        return client

    def _generators_client(self, room: str, rules: Rules, seed: int, encrypted: bool) -> Client:
        """Connect to the generator, which rank 0 starts."""
        world, departures = self._world, self._departures
        names = world.interfaces or tuple(link.name for link in world.links)
        hosted = world.host_service is not None
        config = GeneratorConfig(
            room=room,
            host_of=world.layout.host_of,
            interfaces=("lo",) if world.threads else names,
            encrypted=encrypted,
            timeout=world.timeout,
            rules=rules,
            seed=seed,
            started_by=-1 if hosted else world.rank,
            ranks=world.members,
        )
        try:
            if world.rank == 0 and not world.returned:
                self._start_generator(config, 0)
            client = config.client(
                world.store, world.rank, world.returned, self._is_running, world.name_of,
                functools.partial(self._start_generator, config), self._has_died,
            )  # fmt: skip
        except BaseException as error:
            self._end_service(kill=True)
            if isinstance(error, OSError) and not isinstance(error, WingbeatError):
                raise UsageError(
                    f"{world.name_of(world.rank)}: cannot start the group generator: {error}"
                ) from None
            raise
        client.on_fetch = self._send_state
        client.on_generation = (self._leader or self.reducer).renew
        client.on_lost, client.on_back = departures.lost, departures.back
        if self._leader is not None:
            client.set_watch(self._leader.watch)
        return client

    def _start_generator(self, config: GeneratorConfig, incarnation: int) -> None:
        """Start the generator in the background; the search for one calls it in a thread."""
        self._end_service(kill=True)
        start = ThreadService if self._world.threads else ProcessService
        config = replace(config, incarnation=incarnation)
        self._service = (self._world.host_service or start)(config, self._world.store)
        if self._closed:
            self._end_service(kill=True)

    def _is_running(self, worker: int) -> bool:
        return failures.is_alive(self._world.store, self._world.ranks[worker])

    def _has_died(self, worker: int) -> bool:
        store, rank = self._world.store, self._world.ranks[worker]
        return failures.process_has_ended(store, rank) and not failures.has_finished(store, rank)

    def step(self) -> None:
        """Average the buffer with groups, until the next step may begin."""
        with self._leading(Call.STEP):
            self.client.step(self._leader or self.reducer)

    def synchronize(self) -> None:
        """Average the buffer over all active workers, once all of them have called this.

        Afterwards it is the same on all of them. The others may make steps before.
        """
        with self._leading(Call.SYNCHRONIZE):
            self.client.synchronize(self._leader or self.reducer)

    def _leading(self, call: Call) -> contextlib.AbstractContextManager[None]:
        if self._leader is None:
            return contextlib.nullcontext()
        assert not isinstance(self.client, Follower)
        return self._leader.call(call, self.client)

    def copy_state_when_excluded(self) -> None:
        """Let an excluded worker join no group until `fetch_state`.

        Until then steps end without an average, and `must_fetch` is true.
        """
        self.client.copies_state = True

    @property
    def must_fetch(self) -> bool:
        """Whether this worker must call `fetch_state` before it joins a group again."""
        return self.client.must_fetch

    def fetch_state(self, *, join: bool = False) -> bytearray:
        """Return the state of an active peer, for a restarted or excluded worker before a step.

        The peer calls its `snapshot` while it waits for a group, and sends the state in a thread.
        If it is lost, another peer is used. With ``join`` this worker is active from now on, so the
        peer's group waits for it; otherwise from its next request. Raises UsageError if groups
        follow the static schedule, which does not support rejoining.
        """
        if isinstance(self.client, StaticClient):
            raise UsageError("fetch_state(): the static schedule has no rejoin; use Rules()")
        receive = self._receive
        if self._leader is not None:
            receive = functools.partial(self._leader.receive, receive)
        with self._leading(Call.FETCH):
            return self.client.fetch_state(receive, join=join)

    def _receive(
        self, sender: int, connection: int, is_active: Callable[[], bool]
    ) -> bytearray | None:
        connection += self.reducer.first
        return receive_state(self._world, sender, connection, self._limit, is_active)

    def _send_state(self, receiver: int, connection: int) -> None:
        if self._leader is not None:
            self._leader.send(receiver, connection)
        state = None if self.snapshot is None else self.snapshot()
        self._sender.send(receiver, self.reducer.first + connection, state)

    def close(self) -> None:
        """Leave. The generator ends when all workers have left."""
        self._closed = True
        self._sender.close()
        self.client.leave(failed=graceful_shutdown.is_failing())
        self.reducer.close()
        kill = graceful_shutdown.is_failing() or self.client.fallback is not None
        if isinstance(self.client, Client):
            if kill:
                self.client.mailbox.abandon()
            else:
                with contextlib.suppress(PeerError):  # the generator may have died just now
                    self.client.mailbox.close()
            self._end_service(kill)
        if self._channel is not None:
            self._channel.close(quick=graceful_shutdown.is_failing())

    def _end_service(self, kill: bool) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.kill() if kill else service.close(self._world.timeout)


class GroupAverager:
    """Averages with groups in a thread, while training continues. An `Averager`."""

    def __init__(self, session: GroupSession, buffer: torch.Tensor, world: World) -> None:
        self.buffer, self.session = buffer, session
        self._threads, self._rank, self._closed = world.threads, world.rank, False
        self._me = world.me
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._averages = self._waits = self._completed_before = 0
        self._thread = threading.Thread(target=self._run, name="wingbeat-averages", daemon=True)
        self._thread.start()

    @property
    def members(self) -> tuple[int, ...]:
        """The last group since `begin`; this worker if there was none."""
        reducer = self.session.reducer
        return reducer.members if reducer.completed > self._completed_before else (self._rank,)

    @property
    def left_out(self) -> bool:
        """Whether groups continue without this worker, which must copy a peer's state."""
        return self.session.must_fetch

    def begin(self, part: Span, weight: float | None = None) -> None:
        """Start to average the part with the next groups. It must not be used until `end`."""
        self._start(part, weight, synchronize=False)

    def end(self) -> None:
        """Wait until this worker's groups are done."""
        self._waits += not self._idle.is_set()
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def commit(self) -> None:
        """Record that the average is applied; its compression error is sent with the next one."""
        self.session.reducer.compression.commit()

    def synchronize(self, part: Span | None = None) -> None:
        """Replace the buffer by the mean over all active workers, which all call this.

        It is sent uncompressed, after compression errors of earlier averages are added to it.
        """
        self.session.reducer.compression.add_residual(self.buffer)
        self._start(part or Span(0, self.buffer.numel()), None, synchronize=True)
        self.end()

    def sections(self) -> Sequence[Section]:
        """Return counts, the last group and lost peers for `wingbeat top`."""
        client, group = self.session.client, self.session.reducer.members
        cells: dict[str, Cell] = {
            "averages": self._averages,
            "waits": self._waits,
            "group": " ".join(map(str, sorted(group))),
            "absent": " ".join(map(str, sorted(client.lost_peers))),
            "generator": "gone" if client.fallback else "",
        }
        return [Section("groups", cells)]

    def close(self) -> None:
        """Leave. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._threads:
            # The worlds of one process are closed one after the other.
            threading.Thread(target=self._end, name="wingbeat-ending").start()
        else:
            self._end()

    def _end(self) -> None:
        if not graceful_shutdown.is_failing():
            self._thread.join()
        self.session.close()

    def _start(self, part: Span, weight: float | None, *, synchronize: bool) -> None:
        if self._closed:
            raise UsageError(
                f"{self._me}: wingbeat was shut down; models cannot be averaged: call "
                "wingbeat.shutdown() after the last step and wingbeat.synchronize()"
            )
        reducer = self.session.reducer
        reducer.part, reducer.weight, reducer.uncompressed = part, weight, synchronize
        self._completed_before = reducer.completed
        self._idle.clear()
        self._jobs.put(self.session.synchronize if synchronize else self.session.step)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
                self._averages += 1
            except BaseException as error:  # raised in the training thread
                self._error = error
            self._idle.set()
