"""The state machine of a worker, without torch, clock or I/O (Canary, sections 4.3, 4.4.2, 5.3).

The caller reports the events of training and the received messages, and then sends the messages in
``outbox``. If two threads call it, one lock is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat.methods.bounded_staleness.bound import StalenessBound, StragglerDetector
from wingbeat.methods.bounded_staleness.messages import (
    Contribution,
    Drained,
    Envelope,
    Message,
    Piece,
    PieceSum,
    Progress,
    PullRequest,
    PullResponse,
    ViewProposal,
    Welcome,
    is_reassigned,
    piece_owner,
)
from wingbeat.methods.bounded_staleness.rounds import (
    Gei,
    OwnedPiece,
    ReceivedRounds,
    SentContributions,
)
from wingbeat.transport.membership import (
    View,
    covers,
    initial_view,
    members,
    merge_views,
    with_incarnation,
    without_worker,
)

Combine = Callable[[int, int, dict[Contribution, Any]], Any]
"""Maps colayer, piece and the contributions in order of addition to the payload of their sum."""


@dataclass(frozen=True, slots=True)
class CommittedView:
    """A view, and the proposal with the most complete rounds; the lowest rank breaks ties."""

    view: View
    best: ViewProposal


class ViewChange:
    """One worker's part in the agreement on a view.

    Each worker sends all others its proposal: the largest view that it has received, and its
    rounds. A worker that receives a larger view merges it and sends its proposal again. A view
    commits when every member has proposed exactly this view. All members have then stopped
    accepting rounds of workers that died, and compute the same result from the same proposals.
    """

    def __init__(self, view: View, *, joining: bool = False) -> None:
        self.proposed = view
        self.view = View((-1,) * len(view)) if joining else view
        self._proposals: dict[int, ViewProposal] = {}

    @property
    def in_progress(self) -> bool:
        """Whether a view has been proposed and is not committed."""
        return self.proposed != self.view

    def propose(self, view: View) -> bool:
        """Merge ``view`` into the proposal; return whether the proposal has changed."""
        before, self.proposed = self.proposed, merge_views(self.proposed, view)
        if self.proposed == before:
            return False
        self._proposals = {}
        return True

    def add_proposal(self, worker: int, proposal: ViewProposal) -> None:
        """Record a worker's proposal; ignore one for another view, which will be sent again."""
        if proposal.view == self.proposed:
            self._proposals[worker] = proposal

    def commit(self) -> CommittedView | None:
        """Commit the proposed view; return None while proposals of members are missing."""
        if not self.in_progress or any(w not in self._proposals for w in members(self.proposed)):
            return None
        self.view = self.proposed
        _, best = min(self._proposals.items(), key=lambda item: (-item[1].complete, item[0]))
        return CommittedView(self.view, best)


class Worker:
    """One worker: its iterations, the pieces that it owns, its rounds, and the view.

    An iteration is `can_begin`, `begin_iteration`, `send_colayer` for each colayer, then
    `end_iteration`. Before it, `take_pulled_state` and `take_round` return what the caller puts
    into the parameters, and `take_pull_requests` the workers that the caller sends them to.
    `finish` follows the last iteration. When ``drained``, all replicas hold the same bits once all
    rounds are taken.

    If parameters can be pulled from another worker, at most ``max_buffered`` rounds are buffered
    (None: no limit). ``incarnation`` is 0, or larger than all earlier ones if the worker was
    restarted.

    Attributes:
        outbox: the messages to send, oldest first.
        iteration: the current or next iteration.
        zeta: the latest iteration that any worker has entered.
        gei: the contributions in the parameters.
        dropped: number of iterations dropped by the bound.
        last_dropped: the last of them, and the number of its colayers sent before.
        pulls: how often parameters were pulled.
        joining: whether this worker was restarted and has no parameters yet.
        expelled: whether the other workers have removed this one; it must be restarted.
        finished: whether this worker begins no iterations until all have finished.
        epoch: how often colayers have changed; messages of other epochs must not be received.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        bound: StalenessBound,
        combine: Combine,
        *,
        max_buffered: int | None = None,
        incarnation: int = 0,
        epoch: int = 0,
    ) -> None:
        self.rank, self.workers, self.incarnation = rank, workers, incarnation
        self.epoch, self._max_buffered = epoch, max_buffered
        self.gei = Gei(workers, bound.colayers)
        self.last_dropped: tuple[int, int] | None = None
        self.dropped = self.pulls = self.zeta = 0
        self.expelled = False
        self._stragglers = StragglerDetector()
        self.joining = incarnation > 0
        self._reset(bound, combine, 0)
        view = with_incarnation(initial_view(workers), rank, incarnation)
        self._view_change = ViewChange(view, joining=self.joining)
        if self.joining:
            self._out = True
            self._rounds.clear_expected()
            self._send_proposal()
        else:
            self._owned[rank] = OwnedPiece(workers, bound.colayers, 0)
        self.gei.enter(0)
        self._advance()

    def _reset(self, bound: StalenessBound, combine: Combine, first: int) -> None:
        """Reset the state of the current colayers, whose first round is ``first``."""
        self.bound, self.colayers, self._combine = bound, bound.colayers, combine
        self.outbox: deque[Envelope] = deque()
        self.iteration = first
        self.finished = self._computing = self._inside = self._out = False
        self._rounds = ReceivedRounds(self.workers, bound.colayers, first)
        self._sent = SentContributions(bound.colayers)
        self._latest: dict[int, Progress] = {}  # by other worker
        self._owned: dict[int, OwnedPiece] = {}
        self._pull_requests: dict[int, int] = {}
        self._drained: dict[int, int] = {}
        self._deferred: list[tuple[int, int, Message]] = []  # messages of later views
        self._last_progress: Progress | None = None
        self._requested: tuple[int, int] | None = None  # worker, and number of rounds
        self._pulled: PullResponse | None = None

    # -- state ----------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The committed view."""
        return self._view_change.view

    @property
    def view_changing(self) -> bool:
        """Whether a view change is in progress."""
        return self._view_change.in_progress

    def incarnation_of(self, worker: int) -> int | None:
        """Return the incarnation of a worker in the proposed view; None if it is dead."""
        number = self._view_change.proposed[worker]
        return None if number % 2 else number // 2

    @property
    def pull_target(self) -> int | None:
        """Number of rounds that pulled parameters must have; None if none are needed."""
        if self.joining:
            return self._rounds.pull_target or self._rounds.applied
        return self._rounds.pull_target

    @property
    def stranded(self) -> bool:
        """Whether no living worker has all parameters, so that none can continue."""
        if self.pull_target is None or self.view_changing:
            return False
        applied = self._applied_by_peer()
        return all(applied.get(worker, 0) < 0 for worker in self._peers())

    @property
    def buffered_rounds(self) -> int:
        """Number of rounds that are held until they are taken or discarded."""
        return self._rounds.buffered

    @property
    def applied(self) -> int:
        """Number of rounds that have been taken, or were pulled with the parameters."""
        return self._rounds.applied

    # -- iterations -----------------------------------------------------------------------

    @property
    def next_iteration(self) -> int:
        """The iteration that would begin now."""
        if not self._out:
            return self.iteration
        # No iteration is repeated, and none is computed whose row is complete without this worker.
        least = max(self._rounds.last_partly_applied(self.rank) + 1, self.gei.retired)
        if self.bound.mode == "BSP":  # nor one that this worker has answered with nothing
            return max(self._sent_through() + 1, least)
        return max(self.zeta, least)

    def can_begin(self) -> bool:
        """Whether the next iteration may begin: no worker would be behind the bound."""
        if self.pull_target is not None:
            return False
        if self._out and self.bound.mode == "BSP":  # the others wait for it from here on
            self._enter_next()
        wanted, s = self.next_iteration, self.bound.s
        required = self.bound.rounds_required(wanted, stragglers=self._stragglers.found)
        if self._rounds.applied < required:
            return False
        return s is None or not self._behind(wanted - s)

    def lagging_peers(self) -> tuple[int, ...]:
        """Return the workers that this one may have to wait for."""
        return self._behind(float("inf") if self.finished else self.next_iteration)

    def begin_iteration(self) -> int:
        """Enter the next iteration, and return its number."""
        self._computing = self._inside = True
        self._enter_next()
        return self.iteration

    def _enter_next(self) -> None:
        self.iteration, self._out = self.next_iteration, False
        self._enter(self.iteration)
        self._advance()

    def send_colayer(self, colayer: int, payloads: Sequence[Any]) -> bool:
        """Send the pieces of a colayer, one to each worker; False if the iteration was dropped."""
        if not self._computing:
            return False
        self.gei.mark_sent(self.iteration, colayer)
        self._sent.add(colayer, self.iteration, payloads)
        for piece, payload in enumerate(payloads):
            self._send_piece(self.iteration, colayer, piece, payload)
        self._advance()
        return True

    def end_iteration(self) -> None:
        """End the iteration after all of its colayers have been computed."""
        if self._computing:
            self.iteration, self._computing = self.iteration + 1, False
        self._inside = False
        self._advance()

    def take_round(self) -> tuple[PieceSum, ...] | None:
        """Return the parts of the next round to apply, by colayer and piece; None without one."""
        if self.pull_target is not None:
            return None
        parts = self._rounds.take_round()
        if parts is not None:
            self.gei.apply_round(parts)
            training = (w for w in self._peers() if not self._has_finished(w))
            entries = (part.entries for part in parts)
            self._stragglers.observe_round(entries, parts[0].number, (self.rank, *training))
            self._release_applied()
            self._advance()
        return parts

    # -- the end of training, and its continuation ----------------------------------------

    def finish(self) -> None:
        """Begin no more iterations, and let all workers apply what is in flight."""
        self.finished, self._inside = True, False
        # The others count the next iteration as entered. Two numbers of rounds would never drain.
        self._enter(self.iteration)
        self._advance()

    @property
    def drained(self) -> bool:
        """Whether all workers have finished and received all that was sent; take rounds before."""
        mine = self._drained.get(self.rank)
        return mine is not None and all(
            self._drained.get(worker) == mine for worker in self._peers()
        )

    @property
    def fully_applied(self) -> bool:
        """Whether all workers are ``drained`` and all rounds are in the parameters here."""
        rounds = self._drained.get(self.rank)
        return self.drained and self.pull_target is None and self._rounds.applied == rounds

    @property
    def peer_resumed(self) -> bool:
        """Whether another worker has resumed since all were drained, so that this one must too."""
        mine = self._drained.get(self.rank)
        return mine is not None and self.zeta >= mine

    def resume(self) -> None:
        """Resume after all were drained, with the same iteration on all workers."""
        # If the view has changed meanwhile, this worker is about to drain again.
        self.iteration = self._drained.get(self.rank, self._rounds.applied)
        self.finished, self._drained = False, {}
        self._enter(self.iteration)
        self._advance()

    def resume_at(self, first: int) -> None:
        """Resume, without being drained, with drained workers that continue with ``first``."""
        self.finished, self._out, self._drained = False, True, {}
        self._enter(first)
        self._advance()

    def change_colayers(self, bound: StalenessBound, combine: Combine, view: View) -> None:
        """Continue with other colayers; all members of ``view`` do so from the same round on.

        The parameters of all workers contain all that was sent, so only deaths since then matter.
        """
        known, first = self._view_change.proposed, self._rounds.applied
        self.epoch += 1
        self.gei = self.gei.with_colayers(bound.colayers, first)
        self._reset(bound, combine, first)
        self._view_change = ViewChange(view)
        for piece in range(self.workers):
            if piece_owner(view, piece) == self.rank:
                self._owned[piece] = OwnedPiece(self.workers, self.colayers, first)
        self._enter(first)
        for worker in members(view):
            if known[worker] != view[worker]:
                self._propose(without_worker(self._view_change.proposed, worker))
        self._advance()

    # -- pulled parameters ----------------------------------------------------------------

    def take_pull_requests(self) -> tuple[int, ...]:
        """Return the workers that have requested the current parameters."""
        if self.pull_target is not None:
            return ()
        ready = tuple(w for w, least in self._pull_requests.items() if least <= self.applied)
        for worker in ready:
            del self._pull_requests[worker]
        return ready

    def pull_response(self, payload: Any) -> PullResponse:
        """Return the message with these parameters."""
        watermarks = self._rounds.watermarks(complete=False)
        return PullResponse(self._rounds.applied, watermarks, self.gei.state(), payload)

    def take_pulled_state(self) -> Any:
        """Return the payload of a `PullResponse` to load now; None if there is none."""
        if self.view_changing:
            return None  # it may contain rounds that will be summed again
        response, self._pulled = self._pulled, None
        target = self.pull_target
        if response is None or target is None or response.applied < target:
            return None
        self._rounds.skip_to(response.applied, response.watermarks)
        self.gei.adopt(response.gei)
        self._release_applied()
        self.joining, self._requested = False, None
        self.pulls += 1
        self._advance()
        return response.payload

    # -- peers ----------------------------------------------------------------------------

    def _peers(self) -> tuple[int, ...]:
        return tuple(worker for worker in members(self.view) if worker != self.rank)

    def _has_finished(self, peer: int) -> bool:
        progress = self._latest.get(peer)
        return progress is not None and progress.finished

    def _iteration_of(self, worker: int) -> int:
        """Return the iteration of a worker; 0 if it is unknown, -1 if the worker is dead."""
        if worker == self.rank:
            return self.iteration
        if self.view[worker] % 2:
            return -1
        progress = self._latest.get(worker)
        return 0 if progress is None else progress.iteration

    def _behind(self, iteration: float) -> tuple[int, ...]:
        """Return the peers that are, or may be, before ``iteration`` and have not finished."""
        latest = ((peer, self._latest.get(peer)) for peer in self._peers())
        return tuple(
            w for w, p in latest if p is None or not (p.finished or p.iteration >= iteration)
        )

    def _applied_by_peer(self) -> dict[int, int]:
        """Return the rounds in the parameters of each peer, -1 if it has to pull them."""
        # Messages of earlier views do not count, because they may be outdated.
        latest = ((peer, self._latest.get(peer)) for peer in self._peers())
        return {w: p.applied for w, p in latest if p is not None and p.view == self.view}

    # -- messages -------------------------------------------------------------------------

    def receive(self, sender: int, incarnation: int, message: Message) -> None:
        """Process a message; messages of one sender arrive in order."""
        if isinstance(message, ViewProposal):
            self._propose(message.view)
            if self._is_current(sender, incarnation):
                self._view_change.add_proposal(sender, message)
        elif self._is_current(sender, incarnation) and not self.expelled:
            self._deliver(sender, incarnation, message)
        self._advance()

    def mark_lost(self, worker: int, incarnation: int) -> None:
        """Record that an incarnation of another worker has died."""
        if self.incarnation_of(worker) == incarnation:
            self._propose(without_worker(self._view_change.proposed, worker))
            self._advance()

    def _is_current(self, worker: int, incarnation: int) -> bool:
        return self._view_change.proposed[worker] == 2 * incarnation

    def _deliver(self, sender: int, incarnation: int, message: Message) -> None:
        match message:
            case (
                Progress(view=view) | Piece(view=view) | PullRequest(view=view) | Drained(view=view)
            ) if not covers(self.view, view):
                self._deferred.append((sender, incarnation, message))
            case Progress():
                self._receive_progress(sender, message)
            case Piece():
                self._receive_piece(sender, message)
            case PieceSum():
                self._receive_sum(sender, incarnation, message)
            case Welcome(piece, first_rounds):
                self._rounds.expect(piece, first_rounds)
            case PullRequest(applied=applied):
                self._pull_requests[sender] = applied
            case PullResponse():
                self._pulled = message
            case Drained(rounds=rounds):
                self._drained[sender] = rounds

    def _receive_progress(self, sender: int, progress: Progress) -> None:
        self._latest[sender] = progress
        self._enter(max(progress.zeta, progress.iteration))
        for piece, owned in self._owned.items():
            if self._is_valid_for(piece, progress.view):
                owned.mark_sent_through(sender, progress.sent_through)

    def _receive_piece(self, sender: int, message: Piece) -> None:
        owned = self._owned.get(message.piece)
        if owned is not None and self._is_valid_for(message.piece, message.view):
            owned.add_contribution(sender, message.iteration, message.colayer, message.payload)

    def _is_valid_for(self, piece: int, view: View) -> bool:
        """Whether a message of a view counts for a piece; if not, it will be sent again."""
        return not is_reassigned(self.view, piece) or view == self.view

    def _receive_sum(self, sender: int, incarnation: int, message: PieceSum) -> None:
        if is_reassigned(self._view_change.proposed, message.piece):
            if not covers(self.view, message.view):
                self._deferred.append((sender, incarnation, message))
                return
            if message.view != self.view:
                return  # the piece is summed again
        if self._rounds.is_next(message):
            self._rounds.add_sum(message)

    def _send(self, to: Iterable[int], message: Message) -> None:
        if receivers := tuple(to):
            self.outbox.append(Envelope(receivers, message))

    def _send_to_peers(self, message: Message) -> None:
        self._send(self._peers(), message)

    def _send_piece(self, iteration: int, colayer: int, piece: int, payload: Any) -> None:
        message = Piece(iteration, colayer, piece, self.view, payload)
        owner = piece_owner(self.view, piece)
        if owner == self.rank:
            self._receive_piece(self.rank, message)
        else:
            self._send((owner,), message)

    # -- view changes ---------------------------------------------------------------------

    def _propose(self, view: View) -> None:
        before = self._view_change.proposed
        if self._view_change.propose(view):
            proposed = self._view_change.proposed
            self._send_proposal({w for w, number in enumerate(before) if proposed[w] != number})

    def _send_proposal(self, changed: set[int] | frozenset[int] = frozenset()) -> None:
        """Send the proposal to all members, and to the workers that were just removed."""
        view = self._view_change.proposed
        self.expelled = view[self.rank] != 2 * self.incarnation
        self._rounds.freeze(True)
        complete = -1 if self.joining else self._rounds.complete
        proposal = ViewProposal(view, complete, self._rounds.watermarks(complete=True))
        self._view_change.add_proposal(self.rank, proposal)
        self._send(sorted((changed | set(members(view))) - {self.rank}), proposal)

    def _install(self, committed: CommittedView, before: View) -> None:
        """Install a view: pieces of dead workers restart from the rounds all members will have."""
        view, first = committed.view, max(committed.best.complete, 0)
        changed = [w for w in range(self.workers) if view[w] != before[w] and w != self.rank]
        for worker in changed:
            for kept in (self._latest, self._pull_requests, self._drained):
                kept.pop(worker, None)
            for owned in self._owned.values():
                owned.remove_worker(worker)
        for piece in range(self.workers):
            if is_reassigned(view, piece):
                self._restart_piece(piece, first, committed)
        joined = tuple(worker for worker in changed if view[worker] % 2 == 0)
        if joined and not is_reassigned(view, self.rank):
            first_rounds = tuple(self._owned[self.rank].next_rounds)
            self._send(joined, Welcome(self.rank, first_rounds))
        self._rounds.freeze(False)
        self._requested = self._last_progress = self._pulled = None
        self._drained.pop(self.rank, None)  # so that a joining worker receives it as well

    def _restart_piece(self, piece: int, first: int, committed: CommittedView) -> None:
        self._rounds.restart_piece(piece, first)
        self._owned.pop(piece, None)
        if piece_owner(committed.view, piece) == self.rank:
            self._owned[piece] = OwnedPiece(self.workers, self.colayers, first)
        watermarks = [row[self.rank] for row in committed.best.watermarks[piece]]
        for colayer, iteration, payload in self._sent.after(piece, watermarks):
            self._send_piece(iteration, colayer, piece, payload)

    # -- consequences of any event --------------------------------------------------------

    def _advance(self) -> None:
        """Perform all transitions that have become possible."""
        before = self.view
        if not self.expelled and (committed := self._view_change.commit()) is not None:
            self._install(committed, before)
            self._send_progress()
            deferred, self._deferred = self._deferred, []
            for sender, incarnation, message in deferred:
                if self._is_current(sender, incarnation):
                    self._deliver(sender, incarnation, message)
        if self.expelled or (self.joining and self.view_changing):
            return
        self._apply_bound()
        self._send_progress()
        self._close_rounds()
        self._check_drained()
        self._discard_buffered()
        self._request_pull()

    def _enter(self, iteration: int) -> None:
        self.zeta = max(self.zeta, iteration)
        self.gei.enter(self.zeta)

    def _apply_bound(self) -> None:
        """Drop the iteration if it is outdated (Pseudocode 1)."""
        if not self._out and not self.finished:
            exchanged = self.gei.exchanged(self.iteration)
            self._out = self.bound.is_outdated(self.zeta - self.iteration, exchanged)
            if self._out and self._computing:
                self.dropped, self.last_dropped = self.dropped + 1, (self.iteration, exchanged)
                self._computing = False
        if self._out:
            self.iteration = self.zeta

    def _sent_through(self) -> int:
        """Return the round up to which this worker has sent all that it has."""
        if self.finished:  # once all have finished: no more until it resumes, even if others did
            return self._drained.get(self.rank, self.zeta + 2) - 1
        if self._out:  # rounds that closed before this worker joined need no answer
            return max(self.zeta, (self.pull_target or 0) - 1)
        # It does not answer for later rounds while no worker is more than one iteration ahead. So
        # workers of about equal speed are summed together, whatever the order of arrival.
        last = self.bound.last_computed(self.iteration, self.zeta)
        return last if last > self.iteration + 1 else self.iteration - 1

    def _send_progress(self) -> None:
        applied = self._rounds.applied if self.pull_target is None else -1
        progress = Progress(
            self.iteration, self._sent_through(), applied, self.finished, self.zeta, self.view
        )
        if progress == self._last_progress:
            return
        self._last_progress = progress
        self._send_to_peers(progress)
        for owned in self._owned.values():
            owned.mark_sent_through(self.rank, progress.sent_through)

    def _close_rounds(self) -> None:
        """Sum the rounds of the owned pieces that can close."""
        view = self.view
        for piece, owned in self._owned.items():
            for colayer, number, pending in owned.close_rounds(members(view)):
                payload = self._combine(colayer, piece, pending)
                earliest = tuple(
                    owned.earliest_pending(colayer, worker, self._iteration_of(worker))
                    for worker in range(self.workers)
                )
                part = PieceSum(colayer, piece, number, tuple(pending), earliest, view, payload)
                self._send_to_peers(part)
                self._receive_sum(self.rank, self.incarnation, part)

    def _check_drained(self) -> None:
        rounds = self.zeta + 2  # the round after all iterations takes late contributions
        if not self.finished or self._rounds.complete < rounds:
            return
        if self._drained.get(self.rank) != rounds and all(map(self._has_finished, self._peers())):
            self._drained[self.rank] = rounds
            self._send_to_peers(Drained(rounds, self.view))

    def _discard_buffered(self) -> None:
        """Discard buffered rounds if their parameters can be pulled from another worker."""
        # Only within an iteration: between two, missing rounds and parameters may still arrive.
        exceeds = self._max_buffered is not None and self._rounds.buffered > self._max_buffered
        if exceeds and self._inside and not self.view_changing:
            latest = (self._latest.get(worker) for worker in self._peers())
            known = sorted((-1 if p is None else p.applied for p in latest), reverse=True)
            # What two peers have, or the only one, survives the death of one more worker.
            end = known[min(1, len(known) - 1)] if known else 0
            if end > self._rounds.applied:
                self._rounds.drop_before(end)

    def _request_pull(self) -> None:
        """Request parameters from the fastest worker if some rounds can no longer arrive."""
        # Not within an iteration: the parameters could not be loaded, and would soon be outdated.
        target = self.pull_target
        if target is None or self._inside or not self._rounds.knows_first_rounds:
            return
        applied = self._applied_by_peer()
        if self._requested is not None:
            source, least = self._requested
            if least >= target and applied.get(source, -1) >= 0:
                return
        fastest = max(applied, key=lambda worker: (applied[worker], -worker), default=None)
        if fastest is not None and applied[fastest] >= 0:
            self._requested = fastest, target
            self._send((fastest,), PullRequest(target, self.view))

    def _release_applied(self) -> None:
        self._sent.release(lambda colayer: self._rounds.last_fully_applied(colayer, self.rank))
