"""The members of an exact strategy that continues without failed ones, in the rendezvous store."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Mapping

from wingbeat.errors import PeerError, RendezvousError
from wingbeat.methods.elastic.agreement import (
    Agreement,
    Condition,
    Decision,
    Fail,
    Limits,
    Propose,
    Report,
    Wait,
    parse_decision,
)
from wingbeat.observe.log import log, log_event
from wingbeat.schema import MalformedMessage, parse_json
from wingbeat.transport.failures import MAX_WAIT_FACTOR, ProcessAddress, WaitLog, probe
from wingbeat.transport.store import AtomicStore, read_value
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World

_POLL_S, _MAX_POLL_S, _BACKOFF = 0.02, 0.2, 1.2
"""Seconds between two reads of the store while the members agree: first, most, and growth."""

_PROBE_S = 0.25
"""Seconds between two probes of a process, and between two reads of its address."""

_PROBES = 2
"""Attempts to connect to a process that does not refuse."""

_LOOK_S = 0.25
"""Seconds between two checks for processes that ask to join."""

_SILENT_S = 2.0
"""Seconds for a process to answer a probe, after a wait for it has failed."""

_STORE_S = 10.0
"""Seconds for which the store may not answer while the members agree."""


class Members:
    """The members of the present epoch, and the way to the next one.

    Args:
        world: of all workers of the job.
        min_replicas: least number of members.
        serial: number of the model, whose members are separate from those of other models.

    Attributes:
        epoch: number of the present epoch, from 0.
        tokens: rank and token of its members.
        wanted: whether another process asks to join.
    """

    def __init__(self, world: World, min_replicas: int, serial: int = 1) -> None:
        assert isinstance(world.store, AtomicStore), "all but a service's can claim keys"
        self._store, self._rank, self._size = world.store, world.rank, world.size
        self._timeout, self._min_replicas = world.timeout, min_replicas
        self._room = f"elastic/{serial}"
        self.token = self._token_of(self._rank)
        self.epoch = 0
        self.tokens: dict[int, str] = {}
        self.wanted = False
        self._addresses: dict[int, ProcessAddress | None] = {}
        self._closed = threading.Event()
        self._looking: threading.Thread | None = None

    def responds(self, rank: int) -> bool:
        """Whether the process of a member answers a probe. Reads nothing from the store."""
        address = self._addresses.get(rank)
        return address is not None and bool(probe(address, 1))

    def _token_of(self, rank: int) -> str:
        """Return the token of the present process of a rank; empty if there is none."""
        address = self._address_of(rank)
        return "" if address is None else address.token

    def _address_of(self, rank: int) -> ProcessAddress | None:
        try:
            return ProcessAddress.from_text(read_value(self._store, f"here/{rank}") or "")
        except ValueError:
            return None

    # -- the first epoch, and later ones ----------------------------------------------------

    def begin(self) -> Decision:
        """Return the first epoch, in which all processes are members."""
        members = tuple((rank, self._token_of(rank)) for rank in range(self._size))
        return Decision(members, 0, 0)

    def enter(self, epoch: int, decision: Decision) -> None:
        """Make ``decision`` the present epoch."""
        self.epoch, self.tokens = epoch, decision.tokens
        self._addresses = {rank: self._address_of(rank) for rank in self.tokens}
        self.wanted = False
        if len(self.tokens) < self._size and self._looking is None:
            self._looking = threading.Thread(
                target=self._look, name="wingbeat-returns", daemon=True
            )
            self._looking.start()

    def close(self) -> None:
        """Stop checking for processes that ask to join."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if len(self.tokens) < self._size and not self.wanted:
                epoch = self.epoch
                with contextlib.suppress(RuntimeError, TimeoutError):  # a store that is away
                    found = self._store.has(f"{self._room}/wanted/{epoch + 1}")
                    self.wanted = found and epoch == self.epoch

    def agree(self, report: Report) -> tuple[int, Decision]:
        """Return the next epoch of which this process is a member, and its number.

        ``report`` is this process's. A `PeerError` if training cannot continue; it names the
        members that are missed.
        """
        epoch, former = self.epoch + 1, self.tokens
        while True:
            decision = self._decision(epoch, former, report)
            if decision.tokens.get(self._rank) == self.token:
                return epoch, decision
            if former.get(self._rank) == self.token:
                log_event(
                    "excluded",
                    f"rank {self._rank}: the others continued without this process, which did not "
                    "respond: it joins again, and copies their weights",
                    rank=self._rank,
                )
            epoch, former, report = epoch + 1, decision.tokens, Report(self.token, 0, -1)

    def join(self) -> tuple[int, Decision]:
        """Return the epoch that admits this process, which was started again, and its number.

        A `RendezvousError` if no member admits it in time.
        """
        epoch, former = 0, self.begin().tokens
        former.pop(self._rank)
        while (found := self._read_decision(epoch + 1)) is not None:
            epoch, former = epoch + 1, found.tokens
        self.epoch, self.tokens = epoch, former
        try:
            return self.agree(Report(self.token, 0, -1))
        except PeerError as error:
            raise RendezvousError(str(error)) from None

    # -- agreement ----------------------------------------------------------------------------

    def _decision(self, epoch: int, former: Mapping[int, str], report: Report) -> Decision:
        """Return the decision of an epoch, after this process has published its report."""
        self._store.set(f"{self._room}/report/{epoch}/{self._rank}", json.dumps(report))
        member = former.get(self._rank) == self.token
        if not member:
            self._store.set(f"{self._room}/wanted/{epoch}", "1")
        agreement = Agreement(former, self._limits(member=member), time.monotonic())
        waited = WaitLog(f"rank {self._rank}", f"the members of epoch {epoch}")
        probes, pause = _Probes(self._rank), _POLL_S
        reports = _Reports(self._store, f"{self._room}/report/{epoch}", self._rank, self._size)
        try:
            while True:
                found = self._read_decision(epoch)
                if found is not None:
                    return found
                now = time.monotonic()
                if reports.read(now, probes.tokens):
                    probes.follow({r: self._address_of(r) for r in {*former, *reports.known}})
                command = agreement.poll(now, reports.known, probes.tokens, probes.conditions)
                match command:
                    case Propose(decision) if member:
                        self._store.claim(f"{self._room}/decision/{epoch}", json.dumps(decision))
                    case Fail(reason):
                        raise PeerError(f"rank {self._rank}: {reason}; {_AGAIN}")
                    case Wait(ranks) if ranks and member:
                        waited.log_if_due(_ranks(ranks))
                    case Wait(ranks) if ranks:
                        waited.check(_ranks(ranks), self._timeout)
                time.sleep(pause)
                pause = min(_MAX_POLL_S, _BACKOFF * pause)
        except (TimeoutError, RuntimeError) as error:
            raise PeerError(
                f"rank {self._rank}: cannot agree on the replicas that continue: "
                f"{first_line(error)}; {_AGAIN}"
            ) from None
        finally:
            probes.close()

    def _limits(self, *, member: bool) -> Limits:
        """Return the limits; a process that asks to join decides nothing by time."""
        return Limits(
            silent_s=min(_SILENT_S, self._timeout) if member else math.inf,
            blocked_s=MAX_WAIT_FACTOR * self._timeout if member else math.inf,
            returned_s=self._timeout,
            min_replicas=self._min_replicas if member else 1,
        )

    def _read_decision(self, epoch: int) -> Decision | None:
        key = f"{self._room}/decision/{epoch}"
        if not self._store.has(key):
            return None
        try:
            found = parse_decision(self._store.get(key, _STORE_S), self._size)
        except MalformedMessage as error:
            raise PeerError(
                f"rank {self._rank}: another worker has written a malformed decision: {error}; all "
                "workers have to run the same wingbeat"
            ) from None
        return found


_AGAIN = "start all replicas again from a checkpoint"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


class _Reports:
    """The reports of an epoch. What is known is not read again, as all members read at a time.

    Attributes:
        known: the last report of each rank.
    """

    def __init__(self, store: AtomicStore, prefix: str, rank: int, size: int) -> None:
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._answered, self._addressed = time.monotonic(), -math.inf
        self.known: dict[int, Report] = {}

    def read(self, now: float, tokens: Mapping[int, str]) -> bool:
        """Read what is new; return whether the addresses of processes are to be read, too.

        ``tokens`` are those of the present processes: one that has ended may be replaced by one
        that reports again. A `TimeoutError` if the store does not answer.
        """
        before = {rank: each.token for rank, each in self.known.items()}
        self.known.pop(self._rank, None)  # read each time, as it shows that the store answers
        for rank in range(self._size):
            if rank not in self.known or self.known[rank].token != tokens.get(rank):
                self._read_one(rank)
        if self._rank in self.known:
            self._answered = now
        elif now - self._answered > _STORE_S:
            raise TimeoutError(f"the store has not answered for {_STORE_S:g} s")
        new = any(each.token != before.get(rank) for rank, each in self.known.items())
        if new or now >= self._addressed + _PROBE_S:
            self._addressed = now
            return True
        return False

    def _read_one(self, rank: int) -> None:
        text = read_value(self._store, f"{self._prefix}/{rank}")
        if text is not None:
            try:
                self.known[rank] = parse_json(Report, text)
            except MalformedMessage as error:
                log.warning("rank %d: report of rank %d ignored: %s", self._rank, rank, error)


class _Probes:
    """Probes processes of other ranks, each in a thread of its own, because a probe may block."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._of: dict[int, _Probe] = {}

    def follow(self, addresses: Mapping[int, ProcessAddress | None]) -> None:
        """Probe the processes at these addresses, by rank."""
        for rank, address in addresses.items():
            known = self._of.get(rank)
            if known is None or known.address != address:
                if known is not None:
                    known.close()
                self._of[rank] = _Probe(address, own=rank == self._rank)

    @property
    def tokens(self) -> dict[int, str]:
        """The token of the present process of each rank; empty if there is none."""
        return {rank: each.token for rank, each in self._of.items()}

    @property
    def conditions(self) -> dict[int, Condition]:
        """What the last probe of each process has found."""
        return {rank: each.found for rank, each in self._of.items()}

    def close(self) -> None:
        """End all threads after their present probes."""
        for each in self._of.values():
            each.close()


_FOUND = {True: Condition.ALIVE, False: Condition.GONE, None: Condition.SILENT}


class _Probe:
    """Probes one process until it has ended."""

    def __init__(self, address: ProcessAddress | None, *, own: bool) -> None:
        self.address, self.found = address, Condition.ALIVE if own else Condition.UNKNOWN
        self.token = "" if address is None else address.token
        self._closed = threading.Event()
        if address is None:
            self.found = Condition.GONE
        if own or address is None:
            return
        threading.Thread(target=self._run, name="wingbeat-probe", daemon=True).start()

    def _run(self) -> None:
        assert self.address is not None
        while not self._closed.is_set() and self.found is not Condition.GONE:
            answer = probe(self.address, _PROBES)
            self.found = _FOUND[answer]
            self._closed.wait(_PROBE_S)

    def close(self) -> None:
        """End the thread after its present probe."""
        self._closed.set()
