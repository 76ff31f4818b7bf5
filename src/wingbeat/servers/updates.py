"""A server that updates: its parameters, the step that is due, and who is to hear of it. Pure.

Geryon (Wang et al., 2020), section II-A: servers aggregate, and workers pull parameters. A slice is
updated as soon as its sum is complete and the step is known; no slice waits for another.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from wingbeat.servers.documents import Document
from wingbeat.servers.dtypes import Array
from wingbeat.servers.protocol import NO_ROUND, Ids, Kind, position_of
from wingbeat.servers.sums import EACH, Refused, Sum

Key = tuple[int, int]
"""Plan and slice."""


class Applies(Protocol):
    """Who does the arithmetic: `wingbeat.servers.applying.Applier`."""

    def hold(self, words: Mapping[str, Any], data: bytearray) -> Any:
        """Take the parameters of a slice, with what is remembered of them."""

    def put(self, held: Any, data: bytearray) -> None:
        """Take other values, in new memory."""

    def renew(self, held: Any) -> None:
        """Leave the memory to those who still read it."""

    def drop(self, held: Any) -> None:
        """Forget a slice."""

    def export(self, held: Any) -> tuple[dict[str, Any], list[memoryview]]:
        """Return what is remembered of a slice."""

    def settle(self, groups: list[dict[str, Any]], words: dict[str, Any]) -> None:
        """Have these settings for the steps that follow."""

    def step(self, held: Any, gradients: Array, used: frozenset[int]) -> None:
        """Update the parameters of a slice."""


@dataclass(eq=False, slots=True)
class Shard:
    """One slice with its parameters.

    Attributes:
        held: they, and what is remembered of them.
        made: as they travel; its round is how often they had been updated.
        final: gradients to be used in place of a sum, in the next update.
        wish: how the parameters are to be sent if nobody asks.
        fetches: workers that wait for the next update, and what they have asked for.
    """

    held: Any
    made: Sum
    final: Array | None = None
    wish: int = 0
    fetches: dict[int, Ids] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One update of all slices, as the workers tell of it.

    Attributes:
        plan: whose slices.
        number: the updates after it.
        round: whose sums are used; `NO_ROUND`: gradients that were sent for it.
        since: when the first worker told of it, in seconds.
        said: by worker: whether parameters are to come to it unasked.
        digest: of the settings, by the first worker that has some.
        words: the settings, from the worker that leads; None before it has told.
        rest: slices that are still to be updated.
        used: parameters that some worker has a gradient for.
    """

    plan: int
    number: int
    round: int
    since: float
    said: dict[int, bool] = field(default_factory=dict)
    digest: tuple[int, str] | None = None
    words: dict[str, Any] | None = None
    rest: set[int] = field(default_factory=set)
    used: frozenset[int] = frozenset()


class Updates:
    """All parameters of one server.

    Args:
        workers: how many there are.
        make: makes what does the arithmetic, when it is needed for the first time.
        finished: returns a slice's sum of a round if it is complete, as `Sums.finished`.
        most: bytes that parameters and state may take.

    Attributes:
        nbytes: that they take.
    """

    def __init__(
        self,
        workers: int,
        make: Callable[[], Applies],
        finished: Callable[[Key, int], Sum | None],
        most: int,
    ) -> None:
        self._workers = workers
        self._make = make
        self._finished = finished
        self._most = most
        self._applier: Applies | None = None
        self._shards: dict[int, dict[int, Shard]] = {}
        self._documents: dict[int, tuple[Ids, Document]] = {}
        self._ready: dict[int, int] = {}
        self._step: Step | None = None
        self._due: list[tuple[int, int]] = []
        self.nbytes = 0

    @property
    def due(self) -> bool:
        """Whether a slice can be updated now."""
        return bool(self._due)

    def missing(self, before: float) -> set[int]:
        """Return the workers that do not tell of a step which others told of before a moment."""
        step = self._step
        if step is None or step.since >= before or len(step.said) == self._workers:
            return set()
        return set(range(self._workers)) - step.said.keys()

    def lacking(self, worker: int) -> bool:
        """Whether a step waits for that worker."""
        step = self._step
        return step is not None and worker not in step.said

    # -- what workers say -----------------------------------------------------------------

    def take(self, worker: int, kind: int, ids: Ids, payload: Any, now: float = 0.0) -> None:
        """Take a message that is about parameters, but for those that are to be answered.

        Raises:
            Refused: it does not fit what has come before.
        """
        match kind:
            case Kind.HOLD:
                self._finish(worker, ids, Document(payload, self._most - self.nbytes))
            case Kind.MORE if worker in self._documents:
                ids, document = self._documents.pop(worker)
                document.add(payload)
                self._finish(worker, ids, document)
            case Kind.READY:
                self._ready[worker] = ids.plan
                if len(self._ready) == self._workers:
                    self._drop_before(min(self._ready.values()))
            case Kind.FINAL:
                shard = self._shard(worker, ids)
                if len(payload) != shard.held.memory.nbytes:
                    raise Refused(f"rank {worker} sent {len(payload)} bytes of final gradients")
                # A copy: the optimizer may write to them, and that memory may be read only.
                shard.final = np.frombuffer(payload, np.uint8).copy()
            case Kind.STEP:
                self._tell(worker, ids, payload, now)
            case _:
                raise Refused(f"rank {worker} sent a message of kind {kind}")

    def wish(self, key: Key, wish: int) -> None:
        """Note how a worker wants what comes of a slice."""
        shard = self._shards.get(key[0], {}).get(key[1])
        if shard is not None:
            shard.wish = wish

    def summed(self, key: Key) -> None:
        """A slice's sum is complete."""
        step = self._step
        if step is not None and step.plan == key[0] and key[1] in step.rest:
            self._push(step, key[1])

    def fetched(self, worker: int, ids: Ids) -> Sum | None:
        """Return the parameters that a worker asks for; None: they are remembered to be sent.

        Raises:
            Refused: it asks for no next ones, or twice.
        """
        shard = self._shard(worker, ids)
        if ids.round == shard.made.round:
            return shard.made
        if ids.round != shard.made.round + 1 or worker in shard.fetches:
            raise Refused(f"rank {worker} wants slice {ids.slice} after update {ids.round}")
        shard.fetches[worker] = ids
        return None

    def state(self, worker: int, ids: Ids) -> tuple[dict[str, Any], list[memoryview]]:
        """Return what is remembered of a slice.

        Raises:
            Refused: there is no such slice, or not after that update.
        """
        shard = self._shard(worker, ids)
        if ids.round != shard.made.round:
            raise Refused(
                f"rank {worker} wants the state of slice {ids.slice} after update {ids.round}, "
                f"which had {shard.made.round}"
            )
        return self._applies.export(shard.held)

    # -- updating -------------------------------------------------------------------------

    def work(self) -> Iterator[tuple[int, Ids, Sum]]:
        """Update the slice that is needed first; yield who is to have what.

        Raises:
            Refused: the optimizer has failed.
        """
        if not self._due:
            return
        step = self._step
        assert step is not None
        _, number = heapq.heappop(self._due)
        step.rest.discard(number)
        shard = self._shards[step.plan][number]
        before = shard.held.nbytes
        gradients = self._gradients(step, number, shard)
        if gradients is not None:
            if not shard.made.free():
                self._applies.renew(shard.held)
            self._applies.step(shard.held, gradients, step.used)
        shard.final = None
        shard.made = Sum(step.number, shard.held.dtype, shard.held.memory)
        self._grow(shard.held.nbytes - before)
        if not step.rest:
            self._step = None
        ids = Ids(step.plan, number, step.number, shard.wish)
        fetches, shard.fetches = shard.fetches, {}
        for worker in (worker for worker, unasked in step.said.items() if unasked):
            fetches.setdefault(worker, ids)
        for worker, asked in sorted(fetches.items()):
            yield worker, asked, shard.made

    def _gradients(self, step: Step, number: int, shard: Shard) -> Array | None:
        if step.round == NO_ROUND:
            return shard.final
        total = self._finished((step.plan, number), step.round)
        assert total is not None
        # Somebody may be reading the sum still, and the optimizer may write to gradients.
        return total.result if total.free() else total.result.copy()

    @property
    def _applies(self) -> Applies:
        if self._applier is None:
            try:
                self._applier = self._make()
            except Exception as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                raise Refused(
                    f"the optimizer cannot be made here: {type(error).__name__}: {reason}"
                ) from None
        return self._applier

    def _finish(self, worker: int, ids: Ids, document: Document) -> None:
        """Go on with parameters that have come, in whole or in part."""
        if not document.complete:
            self._documents[worker] = ids, document
            return
        shards = self._shards.setdefault(ids.plan, {})
        shard = shards.get(ids.slice)
        if "pieces" not in document.words:
            self._applies.put(self._shard(worker, ids).held, document.data)
            shard = self._shard(worker, ids)
            shard.made = Sum(shard.made.round, shard.held.dtype, shard.held.memory)
            return
        held = self._applies.hold(document.words, document.data)
        if shard is not None:
            self._forget(shard)
        self._grow(held.nbytes)
        wish = 0 if shard is None else shard.wish
        shards[ids.slice] = Shard(held, Sum(ids.round, held.dtype, held.memory), wish=wish)

    def _shard(self, worker: int, ids: Ids) -> Shard:
        shard = self._shards.get(ids.plan, {}).get(ids.slice)
        if shard is None:
            raise Refused(
                f"rank {worker} speaks of slice {ids.slice} of plan {ids.plan}, whose parameters "
                "nobody has sent"
            )
        return shard

    def _tell(self, worker: int, ids: Ids, payload: Any, now: float) -> None:
        """Note what a worker says of a step; begin when all have."""
        if self._step is None:
            self._step = Step(ids.plan, ids.round, ids.slice, now)
        step = self._step
        if worker in step.said or (ids.plan, ids.round, ids.slice) != (
            step.plan, step.number, step.round
        ):  # fmt: skip
            raise Refused(
                f"rank {worker} makes update {ids.round} in plan {ids.plan} while others make "
                f"update {step.number} in plan {step.plan}"
            )
        step.said[worker] = bool(ids.wish)
        try:
            words = json.loads(bytes(payload))
            digest, leads = str(words["digest"]), "groups" in words
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused(f"rank {worker} sent malformed settings of a step") from None
        if digest:
            first = step.digest or (worker, digest)
            if digest != first[1]:
                raise Refused(
                    f"rank {worker} has other settings in the optimizer's param groups than rank "
                    f"{first[0]}: set the same on all ranks"
                )
            step.digest = first
        if leads:
            step.words = words
        if len(step.said) == self._workers:
            self._begin(step)

    def _begin(self, step: Step) -> None:
        if step.words is None:
            raise Refused("no worker sent the settings of a step")
        step.used = numbers_in(step.words.get("used"))
        self._applies.settle(step.words["groups"], step.words.get("scaler", {}))
        shards = self._shards.get(step.plan, {})
        step.rest = set(shards)
        wrong = {shard.made.round for shard in shards.values()} - {step.number - 1}
        if wrong:
            raise Refused(f"update {step.number} came after update {min(wrong)}")
        for number in shards:
            if step.round == NO_ROUND or self._finished((step.plan, number), step.round):
                self._push(step, number)
        if not step.rest:
            self._step = None

    def _push(self, step: Step, number: int) -> None:
        wish = self._shards[step.plan][number].wish
        heapq.heappush(self._due, (position_of(wish), number))

    def _drop_before(self, plan: int) -> None:
        """Forget older plans: every worker has taken what it needs of them."""
        for old in [old for old in self._shards if old < plan]:
            for shard in self._shards.pop(old).values():
                self._forget(shard)

    def _forget(self, shard: Shard) -> None:
        self._applies.drop(shard.held)
        self.nbytes -= shard.held.nbytes

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        count = sum(map(len, self._shards.values()))
        if self.nbytes + EACH * count > self._most:
            raise Refused(
                f"parameters and optimizer state take {self.nbytes} bytes; the server has room for "
                f"{self._most}"
            )


def numbers_in(bits: Any) -> frozenset[int]:
    """Return the places of the ones in a number that is written in hexadecimal.

    Raises:
        Refused: it is none.

    >>> sorted(numbers_in(bits_of({0, 2, 9})))
    [0, 2, 9]
    """
    try:
        shown = f"{int(bits, 16):b}"
    except (TypeError, ValueError):
        raise Refused(f"malformed parameters of a step: {str(bits)[:40]!r}") from None
    return frozenset(place for place, bit in enumerate(reversed(shown)) if bit == "1")


def bits_of(numbers: Iterable[int]) -> str:
    """Write numbers as the places of ones, in hexadecimal."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return f"{bits:x}"
