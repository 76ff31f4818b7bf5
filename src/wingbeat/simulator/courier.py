"""The communication thread of a worker under bounded staleness, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from wingbeat.methods.bounded_staleness.messages import Envelope, Message, PieceSum
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards, Stream
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.colayers import Coding, Letter, Letters
from wingbeat.simulator.cores import Cores
from wingbeat.simulator.model import ITEMSIZE


class Courier:
    """Receives all arrived messages, then sends all pending ones, as the real thread does.

    Messages and sums take time, during which the thread processes no events.
    """

    def __init__(
        self,
        machine: Worker,
        letters: Letters,
        coding: Coding,
        work: Work,
        agenda: Agenda,
        cores: Cores,
        cards: Cards,
        crew: Sequence[Courier],
    ) -> None:
        self.machine, self._letters, self._work = machine, letters, work
        self._agenda, self._cores, self._cards, self._crew = agenda, cores, cards, crew
        self._add_s = tuple(
            numel * ITEMSIZE * (work.add_s_per_byte + coding.decode_s_per_byte)
            for numel in letters.numel
        )
        self._encode_s = tuple(n * ITEMSIZE * coding.encode_s_per_byte for n in letters.numel)
        self._arrived: deque[tuple[int, Message, Letter]] = deque()
        self._resting = True
        self._thread = self._run()
        self.heard: Callable[[], None] = lambda: None

    def wake(self) -> None:
        """Wake the thread to process pending work."""
        if self._resting and (self._arrived or self.machine.outbox):
            self._resting = False
            self._agenda.at(self._agenda.now, self._go)

    def _go(self) -> None:
        for seconds in self._thread:
            if seconds is None:
                self._resting = True
                return
            if seconds > 0:
                self._cores.work(seconds, self._go)
                return

    def _run(self) -> Iterator[float | None]:
        while True:
            while self._arrived:
                sender, message, letter = self._arrived.popleft()
                yield letter.handled_s(self._work)
                self.machine.receive(sender, 0, message)
                self.heard()
            while self.machine.outbox:
                yield from self._send(self.machine.outbox.popleft())
            if not self._arrived:
                yield None

    def _send(self, post: Envelope) -> Iterator[float]:
        message = post.message
        letter = self._letters.of(message)
        if isinstance(message, PieceSum) and message.entries:
            z = message.colayer
            yield len(message.entries) * self._add_s[z] + self._encode_s[z]
        for to in post.to:
            yield letter.handled_s(self._work)
            self._carry(to, message, letter)

    def _carry(self, to: int, message: Message, letter: Letter) -> None:
        other, me = self._crew[to], self.machine.rank

        def arrived() -> None:
            other._arrived.append((me, message, letter))
            other.wake()

        self._cards.carry(Stream(me, to, 0), letter.nbytes, arrived)
