"""Synchronises buffers, such as BatchNorm's running statistics, with one worker's, as DDP does."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from wingbeat.engine.gradients.bucket import ByteBuffer, broadcast_now, dtype_name
from wingbeat.errors import PeerError, UsageError
from wingbeat.schema import Length, Range, parse_json, printable
from wingbeat.transport.text import MAX_ERROR_CHARS, first_line

if TYPE_CHECKING:
    from wingbeat.collectives import Collectives, Handle
    from wingbeat.transport.world import World

_LONGEST_LAYOUT = 16 << 20
"""Maximum bytes of a layout's text, which suffices for 100,000 buffers."""

_MANY = Length(most=_LONGEST_LAYOUT)
_Shape = tuple[Annotated[int, Range(0, 1 << 63)], ...]
_Layout: Any = tuple[
    Annotated[tuple[tuple[str, str, _Shape, bool], ...], _MANY], Annotated[tuple[str, ...], _MANY]
]

_AS_SENT, _VALUES, _LAYOUT = 0, 1, 2
"""The root's status: buffers as sent after backward; values follow; layout and values follow."""


class Spec(NamedTuple):
    """A buffer's full name, dtype and shape, and whether it is in the state dict."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    persistent: bool

    def fits(self, tensor: torch.Tensor | None) -> bool:
        """Whether the tensor has this dtype and shape."""
        return tensor is not None and tensor.dtype == self.dtype and tensor.shape == self.shape


class BufferSync:
    """Copies one worker's buffers, the root's, to all workers, as DDP's forward does.

    The root's buffers are sent in the background, after the gradients, and may change before the
    next forward. So each synchronised forward begins with a status from the root. If its buffers
    have changed, it sends them again, preceded by their names, shapes and dtypes if these differ.

    A persistent buffer whose shape or dtype differs from the root's is replaced by the root's. A
    non-persistent one stays this worker's. Without lockstep, buffers are copied by `level` only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ignored: Collection[str],
        collectives: Collectives,
        *,
        lockstep: bool = True,
    ) -> None:
        self._model = model
        self._ignored = frozenset(ignored)
        self._collectives = collectives
        self._rank = collectives.world.rank
        self._own: Collectives | None = None
        self._contents = _Contents(model)
        self._all: list[Place] = []
        self._laid_out: tuple[object, object] = None, None
        self._same: list[Place] | None = None
        self._pairs: list[tuple[Spec, torch.Tensor | None]] = []
        found = self._places()
        # `distribute` has compared the workers' models, so all have the root's layout.
        self._layout = _specs(found)
        self._known = _named(found)
        self._device = next((p.device for p in (*model.parameters(), *model.buffers())), None)
        self._sent: ByteBuffer | None = None
        self._before: ByteBuffer | None = None
        self._valid = torch.ones(1, dtype=torch.uint8, device="cpu")
        self._status = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._text = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._handle: Handle | None = None
        self._requested: Handle | None = None
        self._root = 0
        self._exchanges = lockstep and collectives.world.size > 1
        if self._exchanges and any(_may_hold(place) for place in found):
            self._open()

    def _places(self) -> list[Place]:
        """Return all names of buffers; the model is searched only if one or a module has changed.

        A search of 600 modules takes a millisecond, a comparison a tenth of that.
        """
        if self._contents.have_changed():
            self._all = list(_places(self._model, self._ignored))
        return self._all

    @property
    def _me(self) -> int:
        return self._collectives.world.ranks[self._rank]

    @property
    def _peer(self) -> int:
        return self._collectives.world.ranks[self._root]

    def _open(self) -> None:
        # A status must not queue behind gradients.
        self._own = type(self._collectives)(self._collectives.world.open_channel(), "mesh")

    def abandon(self) -> None:
        """Do not wait for what is outstanding when the channel is closed."""
        if self._own is not None:
            self._own.abandon()

    def move(self) -> None:
        """Drop what is outstanding, after the collectives have moved to other workers."""
        self._rank, self._root = self._collectives.world.rank, 0
        self._handle = self._requested = self._sent = self._before = None
        # An operation may still write to the old one.
        self._status = torch.zeros(2, dtype=torch.int64, device="cpu")
        if self._own is not None:
            self._open()

    @property
    def channel(self) -> World | None:
        """The buffers' own channel, to be closed at the end."""
        return None if self._own is None else self._own.world

    def owners(self) -> set[torch.nn.Module]:
        """Return the modules that directly hold synchronised buffers."""
        return {place.module for place in self._places() if not place.shared}

    def tensors(self) -> list[torch.Tensor]:
        """Return the present buffers, each once."""
        places = self._places()
        return [place.tensor for place in places if place.tensor is not None and not place.shared]

    @property
    def pending(self) -> bool:
        """Whether `apply` has something to wait for."""
        return self._handle is not None or self._requested is not None

    def start(self, root: int = 0) -> None:
        """Broadcast rank ``root``'s buffers in the background, with a validity flag."""
        if self._own is None:
            return
        self.apply()
        self._root = root
        now = self._fitting()
        sent = self._packed()
        if self._rank == root:
            self._valid.fill_(all(tensor is not None for tensor in now))
            sent.pack([self._valid, *now])
        else:
            self._before = self._before or self._allocate()
            self._before.pack([None, *now])
        label = "buffers after backward"
        self._handle = self._collectives.broadcast(sent.flat, root, label=label)

    def request(self, root: int) -> None:
        """Request the status of ``root``'s buffers; every worker must call it."""
        if self._own is None and not self._opened_late():
            return
        assert self._own is not None
        if self._handle is not None and root != self._root:
            self._handle.wait()  # as under DDP, another root continues with its own buffers
            self._handle = None
        self.apply()
        self._root = root
        if self._rank == root:
            status, now = _AS_SENT, self._fitting()
            if not self._has_layout(now):
                status = _LAYOUT
                self._describe(self._places())
            elif self._sent is None or not all(self._sent.equal([self._valid, *now])):
                status = _VALUES
            self._status[0], self._status[1] = status, self._text.numel()
        self._requested = self._own.broadcast(self._status, root, label="status of buffers")

    def _opened_late(self) -> bool:
        """Whether every worker's model has its first buffers now."""
        if not self._exchanges:
            return False
        mine = [spec for spec in _specs(self._places()) if spec.persistent]
        if not mine:
            return False
        self._collectives.world.exchange(f"buffer {mine[0].name}, made after distribute()", True)
        self._open()
        return True

    def apply(self) -> None:
        """Wait for a pending broadcast or status, and copy the root's buffers."""
        try:
            if self._handle is not None and self._sent is not None:
                self._handle.wait()
                # Buffers that were written, reshaped or removed since (as by `prune.remove`) stay
                # this worker's until the next forward.
                if self._rank != self._root and self._before is not None and self._sent.flat[0]:
                    self._sent.unpack([None, *self._fitting()], self._before)
        finally:
            self._handle = None  # at the end: other threads wait for it
        try:
            if self._requested is not None and self._own is not None:
                self._receive(self._requested, self._own)
        finally:
            self._requested = None

    def _receive(self, requested: Handle, own: Collectives) -> None:
        requested.wait()
        status, nbytes = self._status.tolist()
        if status == _LAYOUT:
            self._receive_layout(own, nbytes)
        if status != _AS_SENT:
            sent = self._packed()
            if self._rank == self._root:
                self._valid.fill_(1)
                sent.pack([self._valid, *self._fitting()])
            own.broadcast(sent.flat, self._root, label="buffers").wait()
        if self._rank != self._root and self._sent is not None:
            self._copy_from_root(self._sent.views[1:])

    def level(self) -> None:
        """Copy rank 0's buffers now; every worker must call it."""
        if not self._layout and not _specs(self._places()):
            return  # workers that were restarted alone have no peers to send to
        with torch.no_grad():
            self._root = 0
            if self._rank == 0:
                self._describe(self._places())
                self._status[1] = self._text.numel()
            self._collectives.broadcast(self._status, 0, label="status of buffers").wait()
            self._receive_layout(self._collectives, int(self._status[1]))
            values = [
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                if own is None
                else own
                for spec, own in zip(self._layout, self._fitting(), strict=True)
            ]
            broadcast_now(values, self._collectives, root=0)
            if self._rank != 0:
                self._copy_from_root(values)

    def _has_layout(self, now: Sequence[torch.Tensor | None]) -> bool:
        """Whether the present buffers, ``now`` by layout, have the layout's names and kinds."""
        places = self._places()
        if self._same is not places or any(tensor is None for tensor in now):
            self._same = places if _specs(places) == self._layout else None
        return self._same is not None

    def _fitting(self) -> list[torch.Tensor | None]:
        """Return this worker's buffer for each entry of the layout; None where it does not fit."""
        places, layout = self._places(), self._layout
        if self._laid_out[0] is not places or self._laid_out[1] is not layout:
            named = {place.name: place.tensor for place in places}
            self._pairs = [(spec, named.get(spec.name)) for spec in layout]
            self._laid_out = places, layout
        return [tensor if spec.fits(tensor) else None for spec, tensor in self._pairs]

    def _packed(self) -> ByteBuffer:
        """Return the memory for the root's message, allocated once per layout."""
        if self._sent is None:
            self._sent = self._allocate()
        return self._sent

    def _allocate(self) -> ByteBuffer:
        meta = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self._layout]
        return ByteBuffer([self._valid, *meta], self._device)

    def _describe(self, places: Iterable[Place]) -> None:
        self._text = _serialise(_specs(places), _named(places))

    def _receive_layout(self, collectives: Collectives, nbytes: int) -> None:
        try:
            if not 0 < nbytes <= _LONGEST_LAYOUT:
                raise ValueError(nbytes)
            if self._rank != self._root:
                self._text = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            collectives.broadcast(self._text, self._root, label="layout of buffers").wait()
            self._layout, self._known = _parse(self._text)
        except ValueError:
            raise PeerError(
                f"rank {self._me}: rank {self._peer} sent a malformed list of "
                "buffers; all workers have to run the same wingbeat"
            ) from None
        self._sent = self._before = self._same = None

    def _copy_from_root(self, values: Sequence[torch.Tensor]) -> None:
        found = {place.name: place for place in self._places()}
        self._refuse_only_here(found.values())
        for spec, value in zip(self._layout, values, strict=True):
            own = found[spec.name].tensor if spec.name in found else None
            if own is not None and spec.fits(own):
                own.data.copy_(value)
            elif spec.persistent:
                self._replace(spec, value if own is None else value.to(own.device))

    def _replace(self, spec: Spec, value: torch.Tensor) -> None:
        prefix, _, key = spec.name.rpartition(".")
        try:
            module = self._model.get_submodule(prefix)
            module.register_buffer(key, value.clone(), persistent=True)
        except (AttributeError, KeyError) as err:
            name = printable(spec.name[:MAX_ERROR_CHARS])
            raise UsageError(
                f"buffer {name!r}: rank {self._peer} has one of shape {spec.shape}, and "
                f"rank {self._me} no place for it ({first_line(err)}): register it on all "
                "ranks alike, with None if it gets its tensor later"
            ) from None

    def _refuse_only_here(self, places: Iterable[Place]) -> None:
        for place in places:
            if place.tensor is None or not place.persistent or place.name in self._known:
                continue
            raise UsageError(
                f"buffer {place.name!r}: rank {self._me} has one of shape "
                f"{tuple(place.tensor.shape)}, and rank {self._peer} has none: make it in "
                "the same forward on all ranks, or register it with persistent=False if each "
                "worker has its own"
            )


class Place(NamedTuple):
    """A name under which a module keeps a buffer; ``shared`` if an earlier name has its tensor."""

    name: str
    module: torch.nn.Module
    tensor: torch.Tensor | None
    shared: bool
    persistent: bool


class _Contents:
    """The buffers and modules that a model's modules hold, by name and identity."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules: list[torch.nn.Module] = []  # kept alive, as no other may get its identity
        self._held: list[dict[str, Any]] = []
        self._sets: list[set[str]] = []
        self._seen: Any = None

    def have_changed(self) -> bool:
        """Whether they may have changed since the last call; True for the first one."""
        if self._seen is not None and self._seen == self._now():
            return False
        self._modules = list(self._model.modules())
        self._seen = None
        # A compiled module creates its attributes at each access.
        if not any(isinstance(module, torch.jit.ScriptModule) for module in self._modules):
            self._held = [d for m in self._modules for d in (m._buffers, m._modules)]
            self._sets = [module._non_persistent_buffers_set for module in self._modules]
            self._seen = self._now()
        return True

    def _now(self) -> Any:
        return (
            [*map(len, self._held), *map(len, self._sets)],
            list(chain.from_iterable(self._held)),
            list(map(id, chain.from_iterable(map(dict.values, self._held)))),
        )


def _places(model: torch.nn.Module, ignored: Collection[str]) -> Iterator[Place]:
    """Yield all names of buffers, including those of None, which ``named_buffers`` omits."""
    modules: set[int] = set()
    tensors: set[int] = set()  # ids, because hashing tensors would dominate the time
    stack = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in modules:
            continue
        modules.add(id(module))
        for key, tensor in module._buffers.items():
            name = prefix + key
            if name not in ignored:
                persistent = key not in module._non_persistent_buffers_set
                yield Place(name, module, tensor, id(tensor) in tensors, persistent)
                if tensor is not None:
                    tensors.add(id(tensor))
        children = module._modules.items()
        stack.extend((f"{prefix}{key}.", child) for key, child in children if child is not None)


def _specs(places: Iterable[Place]) -> list[Spec]:
    return [
        Spec(place.name, place.tensor.dtype, tuple(place.tensor.shape), place.persistent)
        for place in places
        if place.tensor is not None and not place.shared
    ]


def _named(places: Iterable[Place]) -> frozenset[str]:
    """Return the names with a tensor, shared ones too."""
    return frozenset(place.name for place in places if place.tensor is not None)


def _may_hold(place: Place) -> bool:
    """Whether a buffer may hold a tensor; None in torch's own layers stays None."""
    return place.tensor is not None or not type(place.module).__module__.startswith("torch.nn.")


def _serialise(layout: Iterable[Spec], known: Collection[str]) -> torch.Tensor:
    entries = [[s.name, dtype_name(s.dtype), list(s.shape), s.persistent] for s in layout]
    text = json.dumps([entries, sorted(known)]).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _parse(text: torch.Tensor) -> tuple[list[Spec], frozenset[str]]:
    """Parse a layout and the names of all the root's buffers; raise a `ValueError` if invalid."""
    try:
        entries, known = parse_json(_Layout, bytes(text.tolist()))
        layout = [Spec(name, getattr(torch, dtype), *rest) for name, dtype, *rest in entries]
        names = frozenset(known)
        if not all(spec.name in names and isinstance(spec.dtype, torch.dtype) for spec in layout):
            raise ValueError
    except (ValueError, AttributeError):
        raise ValueError(text) from None
    return layout, names
