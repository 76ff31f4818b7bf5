"""Canary's programming interface for custom exchanges (section 5.1, Table 3)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wingbeat.arguments import check_count, check_tensor, number, numbers, pair
from wingbeat.collectives import Collectives
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.build import bounded_exchange
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.topologies import BCube, Ring
from wingbeat.transport.world import World, current
from wingbeat.types import Group

_MOST_PIECES = 1024
_sessions: weakref.WeakKeyDictionary[World, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Number of sessions of each world; it is the epoch of a session's groups."""


class CanarySession:
    """Collectives within the cubes of a BCube, and access to a worker's gradient exchange index.

    As in the paper:
    ``CanarySession(worker_id=(0, 0)).all_reduce(tensor, cube_id=(0, 0), piece_level=2)``. All
    workers create their sessions in the same order, and the members of a cube call its collectives
    in the same order. The other methods read the state of a model trained with `Canary`, between
    two steps; they raise UsageError for arguments that are not integers, or without a model.

    Args:
        worker_id: this worker's digits, highest level first, ``W_(i, j)`` in the paper: rank
            ``i * ports + j``. Its length is the number of levels; the digits are checked against
            the rank. None: as many levels as interfaces.
        model: a model trained with `Canary`; None if only collectives are used.
        world: the workers; default: those of `wingbeat.init`.

    Raises:
        UsageError: `init` was not called, the workers do not form such a BCube, ``worker_id`` is
            not this worker's, or the model is not trained with `Canary`.
    """

    def __init__(
        self,
        worker_id: Sequence[int] | None = None,
        *,
        model: nn.Module | None = None,
        world: World | None = None,
    ) -> None:
        world = world or current()
        digits = None if worker_id is None else numbers("worker_id", worker_id)
        levels = max(1, len(world.links)) if digits is None else len(digits)
        self._world, self._cube = world, BCube().fitted(world.size, levels)
        self._levels = levels
        if digits is not None and digits != self.worker_id:
            raise UsageError(
                f"CanarySession(worker_id={digits}) on rank {world.rank}, which is "
                f"{self.worker_id} in {self._cube or 'a world of one worker'}: leave it out, or "
                "start the workers in that order"
            )
        self._epoch = next(_sessions.setdefault(world, itertools.count()))
        self._trained = None if model is None else _machine_of(model)
        self._closed = False
        self._whole: Collectives | None = None
        self._cubes: dict[tuple[int, int], Collectives] = {}

    @property
    def worker_id(self) -> tuple[int, ...]:
        """This worker's digits, the highest level first."""
        rank, cube = self._world.rank, self._cube
        if self._world.size == 1:
            return (0,) * self._levels
        return tuple(cube.digit(rank, level) for level in reversed(range(cube.levels)))

    # -- BCube driver -----------------------------------------------------------------------

    @torch.no_grad()
    def all_reduce(
        self,
        tensor: torch.Tensor,
        cube_id: tuple[int, int] | None = None,
        piece_level: int = 1,
    ) -> torch.Tensor:
        """Sum a tensor over the workers of a cube, in place.

        Args:
            tensor: a dense tensor of any shape, the same on all members; it is returned.
            cube_id: the level and the index of the cube at that level, from 0; this worker must be
                a member. None: all workers, over all interfaces.
            piece_level: number of pieces of each interface's part, 1 to 1024; a piece is sent while
                the previous one is added.

        Raises:
            UsageError: the cube does not exist or does not contain this worker, the number of
                pieces is out of range, or the tensor cannot be sent or written to.
            PeerError: another worker failed.
        """
        check_count("piece_level", piece_level, _MOST_PIECES)
        check_tensor(tensor, written=True)
        collectives = self._of(cube_id)
        flat = tensor.detach().contiguous().view(-1)
        for handle in [collectives.all_reduce(piece) for piece in flat.chunk(piece_level)]:
            handle.wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))
        return tensor

    @torch.no_grad()
    def all_gather(
        self,
        tensor: torch.Tensor,
        cube_id: tuple[int, int] | None = None,
        pieces: int = 1,
    ) -> torch.Tensor:
        """Return the tensors of a cube's workers, stacked: shape ``(members, *tensor.shape)``.

        They are in the order of the members' ports (for all workers, of their ranks). This method
        adds nothing; the "allgather" of the paper's Table 2, which also adds the pieces, is
        `all_reduce`. Arguments and errors are those of `all_reduce`.
        """
        check_count("pieces", pieces, _MOST_PIECES)
        check_tensor(tensor)
        collectives = self._of(cube_id)
        mine, members = collectives.world.rank, collectives.world.size
        parts, handles = [], []
        for piece in tensor.detach().contiguous().view(-1).chunk(pieces):
            rows = piece.new_empty((members, piece.numel()))
            rows[mine] = piece
            handles.append(collectives.all_gather(rows.view(-1)))
            parts.append(rows)
        for handle in handles:
            handle.wait()
        return torch.cat(parts, dim=1).view(members, *tensor.shape)

    def _of(self, cube_id: tuple[int, int] | None) -> Collectives:
        if cube_id is None or self._world.size == 1:
            if self._whole is None:
                direct = len(self._world.links) == self._levels and self._world.size > 1
                self._whole = Collectives(self._world, self._cube if direct else Ring())
            return self._whole
        key = pair("cube_id", cube_id)
        if self._closed:
            raise UsageError(
                f"cube_id={key}: the cubes of this session are closed; make another CanarySession, "
                "on all workers"
            )
        if key not in self._cubes:
            self._cubes[key] = self._open(*key)
        return self._cubes[key]

    def _open(self, level: int, number: int) -> Collectives:
        cube, world = self._cube, self._world
        if not (0 <= level < cube.levels and 0 <= number < cube.workers // cube.ports):
            raise UsageError(
                f"cube_id={level, number}: allowed are levels 0 to {cube.levels - 1} and cubes 0 "
                f"to {cube.workers // cube.ports - 1} of {cube}"
            )
        members, low = cube.cube(world.rank, level), cube.ports**level
        mine = world.rank // (low * cube.ports) * low + world.rank % low
        if number != mine:
            raise UsageError(
                f"cube_id={level, number} on rank {world.rank}, which is in ({level}, {mine}) at "
                f"that level, with the ranks {members}"
            )
        interface = level if len(world.links) == cube.levels else None
        group = Group(tuple(members), self._epoch)
        return Collectives(world.open_group(group, interface=interface))

    # -- GEI handler ------------------------------------------------------------------------

    def gei_row_vector(self, iteration: int | None = None) -> tuple[int, ...]:
        """Return r of an iteration: an integer per colayer, with bit i for worker i (section 5.2).

        This worker's bits are set when it sends, the others' when sums are applied. A row that is
        complete on all workers is retired and has the bits of all participants.

        ``iteration`` None is this worker's current one. Raises UsageError if no worker has begun
        the iteration, its row is retired, or there is no model.
        """
        machine = self._machine
        row = machine.iteration if iteration is None else number("iteration", iteration)
        if not machine.gei.retired <= row <= max(machine.gei.zeta, machine.iteration):
            raise UsageError(
                f"iteration={row}: the index has rows {machine.gei.retired} to {machine.gei.zeta}; "
                "those before are complete"
            )
        return machine.gei.row(row, own=machine.rank)[:-1]  # the last colayer has no gradients

    def gei_matrix(self) -> dict[int, tuple[int, ...]]:
        """Return Q: the incomplete rows by iteration; the last is the fastest worker's."""
        gei = self._machine.gei
        return {row: self.gei_row_vector(row) for row in range(gei.retired, gei.zeta + 1)}

    # -- consistency controller -------------------------------------------------------------

    def calc_staleness(self, iteration: int | None = None) -> int:
        """Return how many iterations the fastest worker is ahead (Pseudocode 1, line 5).

        It is compared with ``iteration``; None: this worker's current one.
        """
        machine = self._machine
        at = machine.iteration if iteration is None else number("iteration", iteration)
        return max(0, machine.zeta - at)

    def calc_proportion(self, row: Sequence[int]) -> int:
        """Return in how many colayers this worker's own bit is set (Pseudocode 1, lines 7 to 17).

        ``row`` is a result of `gei_row_vector`. The result is a count, as in the paper's text; its
        pseudocode sums powers of two.
        """
        return sum(mask >> self._world.rank & 1 for mask in numbers("row", row))

    def check_staleness(self, staleness: int, threshold: int | None) -> bool:
        """Return whether the staleness is within s (Pseudocode 1, line 19); None: no bound."""
        staleness = number("staleness", staleness)
        return threshold is None or staleness <= number("threshold", threshold)

    def check_proportion(self, proportion: int, threshold: int) -> bool:
        """Return whether at least p colayers were exchanged (Pseudocode 1, line 22)."""
        return number("proportion", proportion) >= number("threshold", threshold)

    @property
    def _machine(self) -> Worker:
        if self._trained is None:
            raise UsageError(
                "CanarySession without a model has no index: give it one that is trained with "
                "Canary, CanarySession(model=model)"
            )
        return self._trained

    def close(self) -> None:
        """Close the cubes' connections; `shutdown` also closes them."""
        self._closed = True
        for collectives in self._cubes.values():
            collectives.world.close()
        self._cubes.clear()

    def __enter__(self) -> CanarySession:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _machine_of(model: nn.Module) -> Worker:
    exchange = bounded_exchange(model) if isinstance(model, nn.Module) else None
    if exchange is None:
        raise UsageError(
            f"CanarySession(model={type(model).__name__}): allowed is a model that "
            "distribute() has returned with wingbeat.Canary(), of two workers or more"
        )
    return exchange.machine
