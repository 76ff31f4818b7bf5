"""A worker under bounded staleness: a state machine without torch, clock or I/O (Canary, 5.3).

Whoever drives it tells it what training does and what arrives, and then sends what is in
``posts``. One lock around it is enough where two threads do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wingbeat.methods.bounded_staleness.core import Core
from wingbeat.methods.bounded_staleness.messages import Parameters, Round


class Worker(Core):
    """One worker's iterations, pieces, rounds, and what it knows of the others.

    An iteration is ``ready()``, `begin`, then `computed` for each colayer, then `finish`. Before it
    `adopt` and `take` return what is to be put into the parameters, and `serve` who is to be sent
    them. After the last comes `end`; when ``settled``, all replicas hold the same bits once all
    rounds are taken.
    """

    # -- what training does ---------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The iteration that would begin now."""
        if not self._out:
            return self.at
        # No iteration twice, and none of a row that is complete without this worker.
        least = max(self._rounds.touched(self.rank) + 1, self.gei.retired)
        if self.pace.mode == "BSP":  # nor one that it has said to have nothing for
            return max(self._said() + 1, least)
        return max(self.zeta, least)

    def ready(self) -> bool:
        """Whether the wanted iteration may be computed: nobody is left behind the bound."""
        if self.lacking is not None:
            return False
        if self._out and self.pace.mode == "BSP":  # the others wait for it from here on
            self.at, self._out = self.wanted, False
            self._enter(self.at)
            self._go_on()
        wanted, s = self.wanted, self.pace.s
        if self._rounds.applied < self.pace.first_needed(wanted, even=self._even.now):
            return False
        return s is None or self._others.reach(self._agreement.view, wanted - s)

    def behind(self) -> tuple[int, ...]:
        """Return the workers that may have to be waited for: they are behind, or have not ended."""
        most = 1 << 62 if self.ended else self.wanted
        return self._others.behind(self._agreement.view, most)

    def begin(self) -> int:
        """Enter the wanted iteration, and return it."""
        self.at, self._out = self.wanted, False
        self._computing = self._inside = True
        self._enter(self.at)
        self._go_on()
        return self.at

    def computed(self, colayer: int, payloads: Sequence[Any]) -> bool:
        """Send a colayer's pieces, one for each worker's number, as its backward is done.

        Returns:
            Whether they were sent: they are not if the iteration has been dropped meanwhile.
        """
        if not self._computing:
            return False
        self.gei.sent(self.at, colayer)
        self._kept.add(colayer, self.at, payloads)
        for piece, payload in enumerate(payloads):
            self._send_piece(self.at, colayer, piece, payload)
        self._go_on()
        return True

    def finish(self) -> None:
        """End the iteration: all of its colayers have been computed."""
        if self._computing:
            self.at, self._computing = self.at + 1, False
        self._inside = False
        self._go_on()

    def take(self) -> tuple[Round, ...] | None:
        """Return the next round to apply, its parts by colayer and piece; None if none is there."""
        if self.lacking is not None:
            return None
        parts = self._rounds.take()
        if parts is not None:
            self.gei.apply(parts)
            others = self._others.training(self._agreement.view)
            entries = (part.entries for part in parts)
            self._even.applied(entries, parts[0].number, (self.rank, *others))
            self._release()
            self._go_on()
        return parts

    @property
    def waiting(self) -> int:
        """How many rounds are held until they are taken, or let go."""
        return self._rounds.waiting

    @property
    def applied(self) -> int:
        """How many rounds have been taken, or were pulled with the parameters."""
        return self._rounds.applied

    def end(self) -> None:
        """Begin no more iterations, and let what is under way be applied everywhere."""
        self.ended, self._inside = True, False
        self._go_on()

    @property
    def settled(self) -> bool:
        """Whether all have ended and have everything that was sent; `take` it before looking."""
        mine = self._settled.get(self.rank)
        return mine is not None and all(
            self._settled.get(worker) == mine for worker in self._peers()
        )

    @property
    def level(self) -> bool:
        """Whether all have settled, and all of it is in the parameters here."""
        rounds = self._settled.get(self.rank)
        return self.settled and self.lacking is None and self._rounds.applied == rounds

    @property
    def resumed_elsewhere(self) -> bool:
        """Whether another worker has resumed since all settled, so that this one has to as well."""
        mine = self._settled.get(self.rank)
        return mine is not None and self.zeta >= mine

    def resume(self) -> None:
        """Go on after all have settled: with the same iteration everywhere."""
        # If somebody came or went meanwhile, it is about to settle again.
        self.at = self._settled.get(self.rank, self._rounds.applied)
        self._settled = {}
        self.ended = False
        self._enter(self.at)
        self._go_on()

    def go_on(self, first: int) -> None:
        """Go on without having settled, with others who had.

        Args:
            first: the iteration that these go on with.
        """
        self.ended, self._out, self._settled = False, True, {}
        self._enter(first)
        self._go_on()

    # -- parameters that are pulled -------------------------------------------------------

    @property
    def joining(self) -> bool:
        """Whether this worker has come back and has no parameters yet."""
        return self._fresh

    @property
    def stranded(self) -> bool:
        """Whether no worker that lives has all parameters, so that nobody can go on."""
        agreement = self._agreement
        lacks = self.lacking is not None and not agreement.frozen
        return lacks and self._others.lack(agreement.view)

    def serve(self) -> tuple[int, ...]:
        """Return the workers that are to be sent these parameters, at the next safe point."""
        if self.lacking is not None:
            return ()
        ready = tuple(w for w, least in self._wishes.items() if least <= self._rounds.applied)
        for worker in ready:
            del self._wishes[worker]
        return ready

    def parameters(self, payload: Any) -> Parameters:
        """Return what is sent to whoever pulls."""
        marks = self._rounds.marks(complete=False)
        return Parameters(self._rounds.applied, marks, self.gei.applied(), payload)

    def adopt(self) -> Any:
        """Return what was pulled, to be taken over now; None if nothing is needed or has come."""
        if self._agreement.frozen:
            return None  # they may have what is going to be summed anew
        message, self._pulled = self._pulled, None
        lacking = self.lacking
        if message is None or lacking is None or message.applied < lacking:
            return None
        self._rounds.skip(message.applied, message.marks)
        self.gei.adopt(message.gei)
        self._release()
        self._fresh, self._asked = False, None
        self.pulls += 1
        self._go_on()
        return message.payload
