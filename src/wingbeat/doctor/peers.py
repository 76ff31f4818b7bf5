"""The processes of a job meet at its store, exchange their facts, and try connections.

No step needs that `wingbeat.init` works. Every wait has a deadline, and each process that cannot
continue returns its own findings. Connections are authenticated as those of a job.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

from wingbeat.doctor import checks, job_checks
from wingbeat.doctor.checks import FAILED, Finding
from wingbeat.doctor.facts import (
    CONNECT_S,
    Facts,
    Listening,
    PathFacts,
    Place,
    Reach,
    not_here,
    reach,
    reach_of,
    text_of,
)
from wingbeat.errors import UsageError
from wingbeat.schema import Length, MalformedMessage, Range, parse_json, to_json
from wingbeat.transport import handshake, interfaces
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import (
    KEY_VARIABLE,
    TAG_PREFIX,
    Authenticator,
    RejectedValue,
    TorchStore,
    tcp_store,
)

T = TypeVar("T")

_STALL_S = 4.0
"""Seconds to send a bulk of data in one direction."""

_EXCHANGE_S = 5.0
"""Seconds for processes that have met to publish the next value."""

_OVERWRITE_S = 2.0
"""Seconds for a process to overwrite a rejected value; after that it has another key."""

_LEAVE_S = 3.0
"""Seconds for the others to read the result, after which the store of rank 0 ends."""

_POLL_S = 0.1
_PINGS = 10
_BULK_BYTES = 64 << 10
_MAX_THREADS = 512
_MAX_SERVED = 1024
_PING, _BULK, _DONE = b"p", b"b", b"k"
_TIME = struct.Struct("<d")
_IP_MTU, _IPV6_MTU = 14, 24
"""Socket options of Linux, which Python does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the processes of a job meet.

    Attributes:
        rank: this process.
        size: number of processes.
        host: name or address of the store's host, from the launcher.
        port: TCP port of the store.
        serves: whether this process serves the store: rank 0, unless the launcher does.
        attempt: number of restarts by the launcher, which keeps its store.
    """

    rank: int
    size: int
    host: str
    port: int
    serves: bool
    attempt: str = "0"

    @property
    def where(self) -> str:
        """The store's address, for messages."""
        return f"{self.host}:{self.port} (MASTER_ADDR, MASTER_PORT)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a process knows at the end.

    Attributes:
        findings: empty if rank 0 has them.
        failed: whether a check has failed.
        hosts: number of hosts that came.
    """

    findings: list[Finding] = field(default_factory=list)
    failed: bool = False
    hosts: int = 1


class _Present(NamedTuple):
    """Ranks that came in time, as rank 0 has decided."""

    ranks: Annotated[tuple[Annotated[int, Range(0, 1 << 32)], ...], Length(most=1 << 20)]


class _Verdict(NamedTuple):
    """Whether a check has failed, and whether rates are measured next."""

    failed: bool
    measures: bool


def examine(
    own: Facts,
    rendezvous: Rendezvous,
    key: bytes | None,
    *,
    timeout: float = 60.0,
    named: Sequence[str] | None = None,
    measure: Callable[[], list[Finding]] | None = None,
) -> Result:
    """Check a job; all of its processes call this together.

    Args:
        own: the facts of this process.
        rendezvous: where they meet.
        key: the job's key, or None.
        timeout: seconds for all of it, without ``measure``.
        named: names of the interfaces to use on this host, as in `wingbeat.init`.
        measure: called on all ranks if no check has failed; returns more findings on rank 0.
    """
    begin = time.monotonic()
    alone = checks.local(own, _local_size(own))
    reached, store = _open_store(rendezvous, key, begin + timeout / 2)
    if store is None:
        return Result(findings=[*alone, reached], failed=True)
    try:
        return _Examination(own, rendezvous, key, timeout, named, store, reached, measure).run(
            begin
        )
    except _Failed as failure:
        with contextlib.suppress(RuntimeError):
            store.set(f"done/{own.rank}", "")
        return Result(findings=[*alone, reached, failure.finding], failed=True)
    except (TimeoutError, RuntimeError) as error:
        lost = Finding(
            "store",
            FAILED,
            f"rank {own.rank}: the store at {rendezvous.where} does not answer: "
            f"{first_line(error)}",
            remedy="rank 0 has ended, or its network is down: read its output",
        )
        return Result(findings=[*alone, lost], failed=True)


def _local_size(own: Facts) -> int:
    text = own.env.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 6 else 1


class _Failed(Exception):
    """This process cannot continue, for the reason in a finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.value)
        self.finding = finding


# -- the store ----------------------------------------------------------------------------


def _open_store(
    rendezvous: Rendezvous, key: bytes | None, deadline: float
) -> tuple[Finding, TorchStore | None]:
    """Return the finding of the store, and the store if it was reached."""
    reached = Reach()
    if not rendezvous.serves:
        reached = reach(rendezvous.host, rendezvous.port, deadline)
    loopback = reached.address.startswith("127.") or reached.address == "::1"
    if reached.outcome == "ok":
        begin = time.monotonic()
        try:
            seconds = max(1.0, deadline - begin)
            root = tcp_store(rendezvous.host, rendezvous.port, seconds, serves=rendezvous.serves)
            auth = None if key is None else Authenticator(key, "doctor")
            store = TorchStore(root, auth).under(f"wingbeat/doctor/{rendezvous.attempt}")
            return checks.store(rendezvous.rank, rendezvous.where, reached), store
        except RuntimeError as error:
            used = "EADDRINUSE" in str(error) or "address already in use" in str(error)
            failed = Reach(outcome="protocol", detail=first_line(error)[:200])
            if used:
                failed = Reach(outcome="in use", detail="the port is in use")
            elif rendezvous.serves:
                failed = not_here(rendezvous.host, rendezvous.port) or failed
            reached = replace(
                failed,
                address=failed.address or reached.address,
                seconds=time.monotonic() - begin,
            )
    return checks.store(rendezvous.rank, rendezvous.where, reached, loopback=loopback), None


# -- the exchange ---------------------------------------------------------------------------


class _Examination:
    """The steps of one process, in order."""

    def __init__(
        self,
        own: Facts,
        rendezvous: Rendezvous,
        key: bytes | None,
        timeout: float,
        named: Sequence[str] | None,
        store: TorchStore,
        reached: Finding,
        measure: Callable[[], list[Finding]] | None,
    ) -> None:
        self._own, self._key = own, key
        self._timeout, self._named, self._store = timeout, named, store
        self._reached, self._measure = reached, measure
        self._rank, self._size = rendezvous.rank, rendezvous.size

    def run(self, begin: float) -> Result:
        self._claim()
        rejected: dict[int, str] = {}
        malformed: dict[int, str] = {}
        if self._rank == 0:
            facts = self._gather(begin + self._timeout / 2, rejected, malformed)
            waited = time.monotonic() - begin
            self._publish("present", _Present(tuple(sorted(facts))))
        else:
            facts, waited = self._read_present(), 0.0
        hosts = job_checks.ranks_by_host(facts)
        leaders = [ranks[0] for ranks in hosts]
        listening: dict[int, Listening] = {}
        with contextlib.ExitStack() as stack:
            if len(leaders) > 1 and self._rank in leaders:
                listening = self._connect(facts, leaders, stack)
            if self._rank:
                return self._follow(begin)
            deadline = max(begin + self._timeout - _EXCHANGE_S, time.monotonic() + 1.0)
            tried = [rank for rank in leaders if rank in listening]
            paths = self._read_all("paths", tried, tuple[PathFacts, ...], deadline)
            job = job_checks.Job(
                size=self._size,
                seconds=waited,
                facts=facts,
                rejected=rejected,
                malformed=malformed,
                duplicates=self._duplicates(),
                listening=listening,
                paths=_known(paths, listening),
            )
            return self._conclude(job)

    # -- values in the store

    def _publish(self, name: str, value: Any) -> None:
        self._store.set(name, json.dumps(to_json(value)))

    def _read(self, name: str, hint: type[T], seconds: float) -> T:
        text = self._store.get(name, seconds, rejected_s=_OVERWRITE_S)
        if text.startswith(TAG_PREFIX):
            raise RejectedValue(f"{name}: its writer has a job key and this process has none")
        return parse_json(hint, text, name)

    def _read_all(
        self, name: str, ranks: Sequence[int], hint: Any, deadline: float | None = None
    ) -> dict[int, Any]:
        """Return the value of each rank that has published it by the deadline."""
        until = time.monotonic() + _EXCHANGE_S if deadline is None else deadline
        found = {}
        for rank in ranks:
            left = max(0.0, until - time.monotonic())
            with contextlib.suppress(TimeoutError, MalformedMessage):
                found[rank] = self._read(f"{name}/{rank}", hint, left)
        return found

    # -- ranks

    def _claim(self) -> None:
        """Publish the facts of this process, unless another one has its rank."""
        text = json.dumps(to_json(self._own))
        other = self._store.claim(f"facts/{self._rank}", text)
        if other == text:
            return
        where = "another host"
        with contextlib.suppress(MalformedMessage):
            where = parse_json(Facts, other, "facts").hostname
        self._publish(f"duplicate/{self._rank}", self._own)
        raise _Failed(checks.duplicate(self._rank, [where, self._own.hostname]))

    def _gather(
        self, deadline: float, rejected: dict[int, str], malformed: dict[int, str]
    ) -> dict[int, Facts]:
        """Return the facts of the ranks that come before the deadline."""
        facts, since = {0: self._own}, time.monotonic()
        while True:
            before = len(facts)
            for rank in range(self._size):
                if rank not in facts:
                    self._look_up(rank, facts, rejected, malformed)
            now = time.monotonic()
            since = now if len(facts) > before else since
            missing = set(range(self._size)) - {*facts, *rejected, *malformed}
            settled = not (rejected or malformed) or now - since > _OVERWRITE_S
            if now >= deadline or (not missing and settled):
                return facts
            time.sleep(_POLL_S)

    def _look_up(
        self,
        rank: int,
        facts: dict[int, Facts],
        rejected: dict[int, str],
        malformed: dict[int, str],
    ) -> None:
        rejected.pop(rank, None)
        malformed.pop(rank, None)
        try:
            text = self._store.peek(f"facts/{rank}")
            if text is None:
                return
            if text.startswith(TAG_PREFIX):
                rejected[rank] = f"it has a job key, and rank 0 has no {KEY_VARIABLE}"
            elif (found := parse_json(Facts, text, "facts")).rank == rank:
                facts[rank] = found
        except RejectedValue:
            rejected[rank] = "it has another job key than rank 0, or none"
        except MalformedMessage as error:
            malformed[rank] = str(error)

    def _read_present(self) -> dict[int, Facts]:
        """Return the facts of the ranks that rank 0 has seen."""
        seconds = self._timeout / 2 + _EXCHANGE_S
        try:
            present = self._read("present", _Present, seconds)
        except RejectedValue:
            raise _Failed(checks.other_key(self._rank)) from None
        except TimeoutError:
            raise self._silence(seconds) from None
        except MalformedMessage as error:
            raise _Failed(checks.unreadable(0, str(error))) from None
        if self._rank not in present.ranks:
            raise _Failed(checks.late(self._rank))
        found = self._read_all("facts", [r for r in present.ranks if r != self._rank], Facts)
        return {**found, self._rank: self._own}

    def _silence(self, seconds: float) -> _Failed:
        """Return the error of a missing value of rank 0; a `RuntimeError` if the store is lost."""
        self._store.peek(f"facts/{self._rank}")
        return _Failed(checks.silent_first_rank(self._rank, seconds))

    def _duplicates(self) -> list[Facts]:
        names = [f"duplicate/{rank}" for rank in range(self._size)]
        found = []
        for name in names:
            if self._store.has(name):
                with contextlib.suppress(TimeoutError, MalformedMessage):
                    found.append(self._read(name, Facts, _EXCHANGE_S))
        return found

    # -- connections

    def _connect(
        self, facts: Mapping[int, Facts], leaders: Sequence[int], stack: contextlib.ExitStack
    ) -> dict[int, Listening]:
        """Listen for the other hosts, connect to them, and publish the paths."""
        secrets = "/".join(facts[rank].secret for rank in leaders)
        key = hmac.digest(self._key or b"", b"doctor/" + secrets.encode(), hashlib.sha256)
        try:
            hosts = [facts[rank].host for rank in leaders]
            chosen = interfaces.choose(hosts, leaders.index(self._rank), self._named)
            sockets = [stack.enter_context(_listen(each.address)) for each in chosen]
            own = Listening(
                places=tuple(
                    Place(
                        name=each.name,
                        address=each.address,
                        subnet=each.subnet,
                        port=listener.getsockname()[1],
                    )
                    for each, listener in zip(chosen, sockets, strict=True)
                )
            )
        except UsageError as error:
            own, sockets = Listening(error=str(error)[:600]), []
        except OSError as error:
            own, sockets = Listening(error=f"cannot listen: {text_of(error)}"), []
        for listener in sockets:
            stack.callback(_serve(listener, self._rank, key))
        self._publish(f"listening/{self._rank}", own)
        others = [rank for rank in leaders if rank != self._rank]
        listening = self._read_all("listening", others, Listening)
        listening[self._rank] = own
        routes = [
            _Route(self._rank, peer, network, mine, theirs)
            for peer in others
            if peer in listening
            for network, (mine, theirs) in enumerate(
                zip(own.places, listening[peer].places, strict=False)
            )
        ]
        connect_s = min(CONNECT_S, self._timeout / 8)
        stall_s = min(_STALL_S, self._timeout / 10)
        with ThreadPoolExecutor(max(1, min(len(routes), _MAX_THREADS))) as pool:
            paths = list(pool.map(lambda each: try_path(each, key, connect_s, stall_s), routes))
        self._publish(f"paths/{self._rank}", paths)
        return dict(sorted(listening.items()))

    # -- the end

    def _conclude(self, job: job_checks.Job) -> Result:
        """Judge the job, tell the others, and wait until they have read it."""
        found = [self._reached, *job_checks.job(job)]
        if len(job.hosts) == 1:  # of several, each checks its own when it listens
            found += checks.named(self._own.host, self._named)
        findings = checks.merged(found, len(job.hosts))
        measures = self._measure is not None and not checks.failed(findings)
        self._publish("verdict", _Verdict(checks.failed(findings), measures))
        if measures and self._measure is not None:
            findings += self._measure()
        # The store ends with this process.
        deadline = time.monotonic() + _LEAVE_S
        for rank in {*job.facts, *job.rejected, *job.malformed} - {0}:
            while not self._is_done(rank) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        return Result(findings=findings, failed=checks.failed(findings), hosts=len(job.hosts))

    def _is_done(self, rank: int) -> bool:
        try:
            return self._store.peek(f"done/{rank}") is not None
        except RejectedValue:  # with another key
            return True

    def _follow(self, begin: float) -> Result:
        """Wait for the result of rank 0."""
        seconds = max(_EXCHANGE_S, begin + 2 * self._timeout - time.monotonic())
        try:
            verdict = self._read("verdict", _Verdict, seconds)
        except (TimeoutError, MalformedMessage):
            raise self._silence(seconds) from None
        findings: list[Finding] = []
        if verdict.measures and self._measure is not None:
            findings = self._measure()
        self._store.set(f"done/{self._rank}", "")
        return Result(failed=verdict.failed or checks.failed(findings))


def _known(
    paths: Mapping[int, Sequence[PathFacts]], listening: Mapping[int, Listening]
) -> dict[int, tuple[PathFacts, ...]]:
    """Return the paths to places that exist: what names others was not sent by this version."""
    return {
        rank: tuple(
            each
            for each in own
            if each.peer in listening
            and each.network < min(len(listening[each.peer].places), len(listening[rank].places))
        )
        for rank, own in paths.items()
    }


# -- one connection -------------------------------------------------------------------------


class _Route(NamedTuple):
    rank: int
    peer: int
    network: int
    own: Place
    target: Place


def try_path(route: _Route, key: bytes, connect_s: float, stall_s: float) -> PathFacts:
    """Connect to a place from an own one, and examine the connection."""
    own, target = route.own, route.target
    begin = time.monotonic()
    found = PathFacts(peer=route.peer, network=route.network, reach=Reach())
    try:
        connection = socket.create_connection(
            (target.address, target.port), connect_s, (own.address, 0)
        )
    except OSError as error:
        return replace(found, reach=reach_of(error, target.address, connect_s))
    with connection:
        reached = Reach(address=target.address, own=own.address, seconds=time.monotonic() - begin)
        connection.settimeout(connect_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            identity = handshake.IDENTITY.pack(route.rank, route.peer, route.network, 0, bytes(8))
            handshake.prove(connection, identity, key)
            trip, clock = _ping(connection)
            mtu = _mtu_of(connection)
        except OSError as error:
            timed_out = isinstance(error, TimeoutError)
            detail = "connected, but no answer arrives" if timed_out else text_of(error)
            outcome = "timeout" if timed_out else "handshake"
            return replace(found, reach=replace(reached, outcome=outcome, detail=detail))
        connection.settimeout(stall_s)
        try:
            stalled = _stalled(connection)
        except OSError as error:
            return replace(found, reach=replace(reached, outcome="error", detail=text_of(error)))
        return replace(
            found, reach=reached, round_trip_s=trip, clock_s=clock, mtu=mtu, stalled=stalled
        )


def _mtu_of(connection: socket.socket) -> int:
    six = connection.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
    return connection.getsockopt(level, option)


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Return the shortest round trip, and the difference of the clocks in it."""
    best, offset = math.inf, 0.0
    for _ in range(_PINGS):
        before, begin = time.time(), time.perf_counter()
        connection.sendall(_PING)
        (theirs,) = _TIME.unpack(handshake.read_exactly(connection, _TIME.size))
        trip = time.perf_counter() - begin
        if trip < best and math.isfinite(theirs):
            best, offset = trip, theirs - (before + trip / 2)
    if not (math.isfinite(best) and abs(offset) < 1e11):
        raise ConnectionError("the peer sent no valid time")
    return best, offset


def _stalled(connection: socket.socket) -> str:
    """Send and receive full-size packets; return the direction in which they are lost.

    An `OSError` if the connection ends.
    """
    way = "there"
    try:
        connection.sendall(_BULK + bytes(_BULK_BYTES))
        handshake.read_exactly(connection, len(_DONE))
        way = "back"
        handshake.read_exactly(connection, _BULK_BYTES)
    except TimeoutError:
        return way
    return ""


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=256)


def _serve(listener: socket.socket, rank: int, key: bytes) -> Callable[[], None]:
    """Answer processes that have the key, in threads; return what ends it."""
    slots = threading.BoundedSemaphore(_MAX_SERVED)

    def answer(connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S + 2 * _STALL_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                identity = handshake.IDENTITY.unpack(handshake.accept(connection, key))
                if identity[1] == rank:
                    for reply in _replies(connection):
                        connection.sendall(reply)
        finally:
            slots.release()

    def run() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    return  # closed
                time.sleep(_POLL_S)  # until another connection ends
                continue
            if slots.acquire(blocking=False):
                name = "wingbeat-doctor"
                threading.Thread(target=answer, args=(connection,), name=name, daemon=True).start()
            else:
                connection.close()

    threading.Thread(target=run, name="wingbeat-doctor", daemon=True).start()

    def end() -> None:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    return end


def _replies(connection: socket.socket) -> Iterator[bytes]:
    while request := connection.recv(1):
        if request == _PING:
            yield _TIME.pack(time.time())
        elif request == _BULK:
            handshake.read_exactly(connection, _BULK_BYTES)
            yield _DONE
            yield bytes(_BULK_BYTES)
        else:
            return
