"""A worker apart from training: it hears, sums, agrees who is there, and keeps to the bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from wingbeat.methods.bounded_staleness.agreement import Agreed, Agreement
from wingbeat.methods.bounded_staleness.gei import Gei
from wingbeat.methods.bounded_staleness.kept import Kept
from wingbeat.methods.bounded_staleness.messages import (
    Entry,
    Here,
    Message,
    Parameters,
    Piece,
    Post,
    Pull,
    Report,
    Round,
    Settled,
    Welcome,
)
from wingbeat.methods.bounded_staleness.others import Others
from wingbeat.methods.bounded_staleness.owned import Ownership
from wingbeat.methods.bounded_staleness.pace import Even, Pace
from wingbeat.methods.bounded_staleness.rounds import Rounds
from wingbeat.methods.bounded_staleness.view import (
    View,
    covers,
    inherited,
    members,
    owner,
    whole,
    with_life,
    without,
)

Combine = Callable[[int, int, dict[Entry, Any]], Any]
"""Colayer, piece and contributions, in the order of addition, to what travels as their sum."""


class Core:
    """A worker without what training calls; see `wingbeat.methods.bounded_staleness.worker.Worker`.

    Args:
        rank: this worker's number.
        workers: how many there are.
        pace: the thresholds.
        combine: adds contributions up.
        keep: rounds that may wait to be applied if another worker can be asked for parameters;
            None for any number.
        life: 0, or a larger number than in all its lives before if the worker comes back.
        history: whether the GEI keeps the rows that are retired.
        epoch: how often colayers have changed before this life.

    Attributes:
        pace: the thresholds.
        colayers: k.
        posts: what is to be sent, oldest first.
        at: the iteration that is computed, or wanted.
        zeta: the latest iteration that any worker has entered.
        gei: what is in the parameters.
        dropped: iterations that the rule has ended, each with the number of colayers that were
            sent and so count.
        pulls: how often parameters were pulled that were let go, or that a new life lacked.
        expelled: the others take this worker for dead; only a new life can go on.
        epoch: how often colayers have changed; what is said in another one is not for this machine.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        pace: Pace,
        combine: Combine,
        *,
        keep: int | None = None,
        life: int = 0,
        history: bool = False,
        epoch: int = 0,
    ) -> None:
        self.rank, self.life, self._n, self.pace = rank, life, workers, pace
        self.colayers, self.epoch = pace.colayers, epoch
        self._combine, self._keep = combine, keep
        self.posts: deque[Post] = deque()
        self.at = self.zeta = 0
        self.gei = Gei(workers, pace.colayers, keep=history)
        self.dropped: list[tuple[int, int]] = []
        self.pulls = 0
        self.expelled = self.ended = self._computing = self._inside = False
        self._rounds, self._even = Rounds(workers, pace.colayers), Even()
        self._kept, self._others = Kept(pace.colayers), Others(rank)
        self._wishes: dict[int, int] = {}
        self._settled: dict[int, int] = {}
        self._aside: list[tuple[int, int, Message]] = []
        self._told: Here | None = None
        self._asked: tuple[int, int] | None = None
        self._pulled: Parameters | None = None
        self._fresh = self._out = life > 0
        self._agreement = Agreement(with_life(whole(workers), rank, life), new=self._fresh)
        self._owned = Ownership(workers, pace.colayers)
        if self._fresh:
            self._rounds.know_nothing()
            self._report()
        else:
            self._owned.begin(rank, 0)
        self.gei.enter(0)
        self._go_on()

    @property
    def lacking(self) -> int | None:
        """How many rounds pulled parameters must have; None if this worker needs none."""
        if self._fresh:
            return self._rounds.lacking or self._rounds.applied
        return self._rounds.lacking

    @property
    def view(self) -> View:
        """Who takes part, as all who do have agreed."""
        return self._agreement.view

    @property
    def agreeing(self) -> bool:
        """Whether somebody came or went, and that is being agreed on."""
        return self._agreement.frozen

    # -- what arrives ---------------------------------------------------------------------

    def receive(self, sender: int, life: int, message: Message) -> None:
        """Take in a message of another worker's life; each worker's arrive in order."""
        if isinstance(message, Report):
            self._learn(sender, life, message)
        elif self._agreement.proposed[sender] == 2 * life and not self.expelled:
            self._deliver(sender, life, message)
        self._go_on()

    def lost(self, worker: int, life: int) -> None:
        """Learn that another worker does not answer any more, in the life that is meant."""
        if self.life_of(worker) == life:
            self._propose(without(self._agreement.proposed, worker))
            self._go_on()

    def life_of(self, worker: int) -> int | None:
        """Return which life of a worker is known to go on; None if none is."""
        number = self._agreement.proposed[worker]
        return None if number % 2 else number // 2

    def _deliver(self, sender: int, life: int, message: Message) -> None:
        match message:
            case Here(view=view) | Piece(view=view) | Pull(view=view) | Settled(view=view) if (
                not covers(self._agreement.view, view)
            ):
                self._aside.append((sender, life, message))
            case Here():
                self._hear(sender, message)
            case Piece():
                self._take_in(sender, message)
            case Round():
                self._receive_round(sender, life, message)
            case Welcome(piece, numbers):
                self._rounds.expect(piece, numbers)
            case Pull(applied=applied):
                self._wishes[sender] = applied
            case Parameters():
                self._pulled = message
            case Settled(rounds=rounds):
                self._settled[sender] = rounds

    def _hear(self, sender: int, here: Here) -> None:
        self._others.hear(sender, here)
        self._enter(max(here.zeta, here.at))
        for piece in self._owned:
            if self._counts(piece, here.view):
                self._owned[piece].said(sender, here.said)

    def _take_in(self, sender: int, message: Piece) -> None:
        if message.piece in self._owned and self._counts(message.piece, message.view):
            owned = self._owned[message.piece]
            owned.add(sender, message.iteration, message.colayer, message.payload)

    def _counts(self, piece: int, view: Any) -> bool:
        """Whether what was sent under a view counts for a piece; else it will be sent anew."""
        return not inherited(self._agreement.view, piece) or view == self._agreement.view

    def _receive_round(self, sender: int, life: int, message: Round) -> None:
        agreement = self._agreement
        if inherited(agreement.proposed, message.piece):
            if not covers(agreement.view, message.view):
                self._aside.append((sender, life, message))
                return
            if message.view != agreement.view:
                return  # it is summed anew
        if self._rounds.expects(message):
            self._rounds.add(message)

    # -- other colayers ---------------------------------------------------------------------

    def rebundle(self, pace: Pace, combine: Combine, view: View) -> None:
        """Go on with other colayers, where all of ``view`` do so from the same rounds.

        All that was sent is in the parameters of all, so nothing of what is known here is needed
        any more, but who has gone since.

        Args:
            pace: the thresholds, with the new number of colayers.
            combine: adds contributions up.
            view: who had settled, this worker among them.
        """
        known, first = self._agreement.proposed, self._rounds.applied
        self.epoch += 1
        self.pace, self.colayers, self._combine = pace, pace.colayers, combine
        self.posts.clear()
        self.gei = self.gei.rebundled(pace.colayers, first)
        self._rounds = Rounds(self._n, pace.colayers, first)
        self._kept, self._others = Kept(pace.colayers), Others(self.rank)
        self._wishes, self._settled, self._aside = {}, {}, []
        self._told = self._asked = self._pulled = None
        self._agreement = Agreement(view)
        self._owned = Ownership(self._n, pace.colayers)
        for piece in range(self._n):
            if owner(view, piece) == self.rank:
                self._owned.begin(piece, first)
        self.at = first
        self.ended = self._computing = self._inside = self._out = False
        self._enter(first)
        for worker in members(view):
            if known[worker] != view[worker]:
                self._propose(without(self._agreement.proposed, worker))
        self._go_on()

    # -- who takes part -------------------------------------------------------------------

    def _peers(self) -> tuple[int, ...]:
        return self._others.peers(self._agreement.view)

    def _propose(self, view: Any) -> None:
        before = self._agreement.proposed
        if self._agreement.propose(view):
            changed = {
                w for w, number in enumerate(before) if self._agreement.proposed[w] != number
            }
            self._report(changed)

    def _report(self, also: set[int] | frozenset[int] = frozenset()) -> None:
        """Tell what this worker has; those whose life is over hear of it as well."""
        view = self._agreement.proposed
        self.expelled = view[self.rank] != 2 * self.life
        self._rounds.hold()
        complete = -1 if self._fresh else self._rounds.complete
        report = Report(view, complete, self._rounds.marks(complete=True))
        self._agreement.hear(self.rank, report)
        self._post(tuple(sorted((also | set(members(view))) - {self.rank})), report)

    def _learn(self, sender: int, life: int, report: Report) -> None:
        self._propose(report.view)
        if self._agreement.proposed[sender] == 2 * life:
            self._agreement.hear(sender, report)

    def _install(self, agreed: Agreed, before: Any) -> None:
        """Let a view hold: pieces whose workers have died begin anew, from what all will have."""
        view, first = agreed.view, max(agreed.best.complete, 0)
        changed = [w for w in range(self._n) if view[w] != before[w] and w != self.rank]
        for worker in changed:
            self._others.forget(worker)
            self._wishes.pop(worker, None)
            self._settled.pop(worker, None)
            self._owned.forget(worker)
        for piece in range(self._n):
            if inherited(view, piece):
                self._restart(piece, first, agreed)
        new = tuple(worker for worker in changed if view[worker] % 2 == 0)
        if new and not inherited(view, self.rank):
            self._post(new, Welcome(self.rank, tuple(self._owned[self.rank].next)))
        self._rounds.go_on()
        self._asked = self._told = self._pulled = None
        self._settled.pop(self.rank, None)  # whoever is new is told as well

    def _restart(self, piece: int, first: int, agreed: Agreed) -> None:
        self._rounds.restart(piece, first)
        self._owned.leave(piece)
        if owner(agreed.view, piece) == self.rank:
            self._owned.begin(piece, first)
        marks = [row[self.rank] for row in agreed.best.marks[piece]]
        for colayer, iteration, payload in self._kept.of(piece, marks):
            self._send_piece(iteration, colayer, piece, payload)

    # -- what follows ---------------------------------------------------------------------

    def _go_on(self) -> None:
        """Do what any event may have made possible."""
        before = self._agreement.view
        if not self.expelled and (agreed := self._agreement.conclude()) is not None:
            self._install(agreed, before)
            self._say()
            aside, self._aside = self._aside, []
            for sender, life, message in aside:
                if self._agreement.proposed[sender] == 2 * life:
                    self._deliver(sender, life, message)
        if self.expelled or (self._fresh and self._agreement.frozen):
            return
        self._bound()
        self._say()
        self._close()
        self._settle()
        self._trim()
        self._ask()

    def _enter(self, iteration: int) -> None:
        self.zeta = max(self.zeta, iteration)
        self.gei.enter(self.zeta)

    def _bound(self) -> None:
        """Drop the iteration if it is out of date (Pseudocode 1)."""
        exchanged = self.gei.exchanged(self.at)
        if not self._out and not self.ended:
            self._out = self.pace.outdated(self.zeta - self.at, exchanged)
            if self._out and self._computing:
                self.dropped.append((self.at, exchanged))
                self._computing = False
        if self._out:
            self.at = self.zeta

    def _said(self) -> int:
        """Up to which round this worker has sent all it has, or has nothing.

        It holds its answers while nobody is more than one iteration ahead: those who are about as
        fast are summed together, whoever of them is first.
        """
        if self.ended:  # and after all have: no more until it resumes, however far others are then
            rounds = self._settled.get(self.rank)
            return self._last if rounds is None else rounds - 1
        if self._out:  # rounds that were closed before this worker was there need no answer
            return max(self.zeta, (self.lacking or 0) - 1)
        reached = self.pace.reached(self.at, self.zeta)
        return reached if reached > self.at + 1 else self.at - 1

    def _say(self) -> None:
        applied = self._rounds.applied if self.lacking is None else -1
        here = Here(self.at, self._said(), applied, self.ended, self.zeta, self._agreement.view)
        if here == self._told:
            return
        self._told = here
        self._post(self._peers(), here)
        self._owned.said(self.rank, here.said)

    def _close(self) -> None:
        """Sum what is complete of the pieces that this worker owns."""
        view = self._agreement.view
        for piece, colayer, number, waiting in self._owned.close(members(view)):
            payload = self._combine(colayer, piece, waiting)
            where = tuple(
                self._owned[piece].first(colayer, worker, self._where(worker))
                for worker in range(self._n)
            )
            part = Round(colayer, piece, number, tuple(waiting), where, view, payload)
            self._post(self._peers(), part)
            self._receive_round(self.rank, self.life, part)

    def _where(self, worker: int) -> int:
        if worker == self.rank:
            return self.at
        return self._others.where(self._agreement.view, worker)

    def _all_ended(self) -> bool:
        return self.ended and self._others.ended(self._agreement.view)

    @property
    def _last(self) -> int:
        """The round after all that others can have had nothing for: it takes what was late."""
        return self.zeta + 1

    def _settle(self) -> None:
        if self._all_ended() and self._rounds.complete > self._last:
            rounds = self._last + 1
            if self._settled.get(self.rank) != rounds:
                self._settled[self.rank] = rounds
                self._post(self._peers(), Settled(rounds, self._agreement.view))

    def _trim(self) -> None:
        """Let go of rounds that wait for training, if there is somebody to pull them from.

        Between iterations none waits: what is not whole is still on its way, and so may the
        parameters be that are pulled.
        """
        waits = self._keep is not None and self._rounds.waiting > self._keep
        if waits and self._inside and not self._agreement.frozen:
            end = self._others.safe(self._agreement.view)
            if end > self._rounds.applied:
                self._rounds.drop(end)

    def _ask(self) -> None:
        """Pull parameters from the fastest if some rounds are not to be had any more.

        Amid an iteration nothing can be put into the parameters, however long it takes: what would
        be pulled then would soon be too old.
        """
        lacking = self.lacking
        if lacking is None or self._inside or not self._rounds.knows_all:
            return
        view = self._agreement.view
        if self._asked is not None:
            asked, least = self._asked
            if least >= lacking and self._others.has_all(view, asked):
                return
        source = self._others.fastest(view)
        if source is not None:
            self._asked = source, lacking
            self._post((source,), Pull(lacking, view))

    def _send_piece(self, iteration: int, colayer: int, piece: int, payload: Any) -> None:
        message = Piece(iteration, colayer, piece, self._agreement.view, payload)
        to = owner(self._agreement.view, piece)
        if to == self.rank:
            self._take_in(self.rank, message)
        else:
            self._post((to,), message)

    def _release(self) -> None:
        """Forget own contributions that are in the parameters."""
        self._kept.release(lambda colayer: self._rounds.counted(colayer, self.rank))

    def _post(self, to: tuple[int, ...], message: Message) -> None:
        if to:
            self.posts.append(Post(to, message))
