"""A server that updates: its parameters, the step that is due, and who is to hear of it. Pure.

Geryon (Wang et al., 2020), section II-A: servers aggregate, and workers pull parameters. A slice is
updated as soon as its sum is complete and the step is known; no slice waits for another.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from wingbeat.methods.parameter_server.aggregator import EACH, Refused, Sum
from wingbeat.methods.parameter_server.documents import Document
from wingbeat.methods.parameter_server.dtypes import Array, converted
from wingbeat.methods.parameter_server.notes import (
    Applies,
    Early,
    Key,
    Reply,
    Shard,
    Step,
    numbers_in,
)
from wingbeat.methods.parameter_server.protocol import NO_ROUND, Ids, Kind, position_of


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
        self._ready = [0] * workers
        self._early: list[Early] = []
        self._step: Step | None = None
        self._due: list[tuple[int, int]] = []
        self._coming = 0
        self.nbytes = 0

    @property
    def due(self) -> bool:
        """Whether a slice can be updated now."""
        return bool(self._due)

    def missing(self, before: float) -> tuple[str, set[int]] | None:
        """Return what somebody waits for since before a moment, and the workers that lack it."""
        step, everyone = self._step, range(self._workers)
        if step is not None and step.since < before:
            lacking = {worker for worker in everyone if worker not in step.said}
            if lacking:
                return "step", lacking
        if any(said.since < before for said in self._early):
            return "optimizer state", {w for w in everyone if self._ready[w] < max(self._ready)}
        return None

    def lacking(self, worker: int) -> bool:
        """Whether something waits for that worker."""
        step = self._step
        late = bool(self._early) and self._ready[worker] < max(self._ready)
        return late or (step is not None and worker not in step.said)

    # -- what workers say -----------------------------------------------------------------

    def take(
        self, worker: int, kind: int, ids: Ids, payload: Any, now: float = 0.0
    ) -> Iterator[Reply]:
        """Take a message that is about parameters; yield what is to be answered.

        What a worker says after a `Kind.READY` is taken when all have said as much: parameters and
        state come from all of them, and nobody is to see only a part.

        Raises:
            Refused: it does not fit what has come before.
        """
        if kind == Kind.READY:
            yield from self._pass(worker, ids.plan)
            return
        if kind == Kind.MORE:
            if worker not in self._documents:
                raise Refused(f"rank {worker} sent more of nothing")
            ids, document = self._documents.pop(worker)
            document.append(payload)
        elif kind == Kind.HOLD:
            document = Document(payload, self._most - self.nbytes - self._coming)
            self._coming += len(document.data)
        else:
            yield from self._hear(Early(worker, self._ready[worker], kind, ids, payload, now))
            return
        if document.complete:
            kind = Kind.HOLD if "pieces" in document.words else Kind.MORE
            # Whole slices are taken when all workers have sent theirs.
            turn = self._ready[worker] + (kind == Kind.HOLD)
            yield from self._hear(Early(worker, turn, kind, ids, document, now))
        else:
            self._documents[worker] = ids, document

    def _pass(self, worker: int, plan: int) -> Iterator[Reply]:
        """A worker has sent all that it has to send; go on if that was the last one."""
        before = min(self._ready)
        self._ready[worker] += 1
        if min(self._ready) > before:
            early, self._early = self._early, []
            # Whoever was first may already ask for what the last has only sent now.
            for each in sorted(early, key=lambda said: (said.turn, said.kind != Kind.HOLD)):
                self._coming -= _kept(each)
                yield from self._hear(each)
            self._drop_before(plan)

    def _hear(self, said: Early) -> Iterator[Reply]:
        if said.turn > min(self._ready):
            self._coming += _kept(said)
            if self._coming + self.nbytes > self._most:
                raise Refused(f"{self._coming} bytes wait; the server has room for {self._most}")
            self._early.append(said)
            return
        worker, ids, payload = said.worker, said.ids, said.payload
        match said.kind:
            case Kind.HOLD:
                self._coming -= len(payload.data)
                self._hold(ids, payload)
            case Kind.MORE:
                self._coming -= len(payload.data)
                self._put(worker, ids, payload)
            case Kind.FETCH:
                yield Reply(worker, ids, self._fetched(worker, ids))
            case Kind.STATE:
                yield Reply(worker, ids, state=self._state(worker, ids))
            case Kind.FINAL:
                shard = self._shard(worker, ids)
                if len(payload) != shard.held.memory.nbytes:
                    raise Refused(f"rank {worker} sent {len(payload)} bytes of final gradients")
                # A copy: the optimizer may write to them, and that memory may be read only.
                shard.final = np.frombuffer(payload, np.uint8).copy()
            case Kind.STEP:
                self._tell(worker, ids, payload, said.since)
            case _:
                raise Refused(f"rank {worker} sent a message of kind {said.kind}")

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

    def _fetched(self, worker: int, ids: Ids) -> Sum | None:
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

    def _state(self, worker: int, ids: Ids) -> tuple[dict[str, Any], list[memoryview]]:
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

    def work(self) -> Iterator[Reply]:
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
            yield Reply(worker, asked, shard.made)

    def _gradients(self, step: Step, number: int, shard: Shard) -> Array | None:
        if step.round == NO_ROUND:
            return shard.final
        total = self._finished((step.plan, number), step.round)
        assert total is not None
        if total.dtype != shard.held.dtype:  # gradients came as another
            return converted(total.result, shard.held.dtype)
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

    def _put(self, worker: int, ids: Ids, document: Document) -> None:
        """Take other values of parameters."""
        shard = self._shard(worker, ids)
        self._applies.put(shard.held, document.data)
        shard.made = Sum(shard.made.round, shard.held.dtype, shard.held.memory)

    def _hold(self, ids: Ids, document: Document) -> None:
        """Take a slice with all that is remembered of it."""
        shards = self._shards.setdefault(ids.plan, {})
        held = self._applies.hold(document.words, document.data)
        before = shards.get(ids.slice)
        if before is not None:
            self._forget(before)
        wish = 0 if before is None else before.wish
        shards[ids.slice] = Shard(held, Sum(ids.round, held.dtype, held.memory), wish=wish)
        self._grow(held.nbytes)

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


def _kept(said: Early) -> int:
    """Return the bytes that a message takes while it waits, besides a document's own."""
    return EACH + (0 if isinstance(said.payload, Document) else len(said.payload))
