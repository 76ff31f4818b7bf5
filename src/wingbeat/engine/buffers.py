"""Buffers (such as BatchNorm's running statistics) follow one worker's, as DDP's do."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.text import LONGEST_ERROR, first_line, printable

if TYPE_CHECKING:
    from wingbeat.collectives import Collectives, Handle
    from wingbeat.transport.world import World

T = TypeVar("T")

_ALIGN = 16

_LONGEST_LAYOUT = 16 << 20
"""Bytes of a layout's text; that of 100,000 buffers has less."""

_AS_SENT, _VALUES, _LAYOUT = 0, 1, 2
"""What the root says when a forward begins: that its buffers are what it has sent after the last
backward, that their values follow, or their names, shapes and dtypes and then their values."""


class ByteBuffer:
    """Tensors of any dtype laid end to end as bytes, to travel in one message.

    Args:
        tensors: what to make room for; only their dtypes and shapes count.
        device: where the bytes are; default: where the first tensor is.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        if device is None:
            device = tensors[0].device if tensors else torch.device("cpu")
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)
        self.views = [
            self.flat[a : a + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for a, t in zip(offsets, tensors, strict=True)
        ]

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the tensors into the bytes; where there is none, they stay as they are."""
        for tensor, view in zip(tensors, self.views, strict=True):
            if tensor is not None:
                view.copy_(tensor)

    @torch.no_grad()
    def unpack(
        self, tensors: Sequence[torch.Tensor | None], where: ByteBuffer | None = None
    ) -> None:
        """Copy the bytes into the tensors; with ``where`` only into those that are as in it."""
        unchanged = [True] * len(tensors) if where is None else where.equal(tensors)
        for tensor, view, as_before in zip(tensors, self.views, unchanged, strict=True):
            if as_before and tensor is not None:
                # Not as a change that autograd sees: batch norm keeps its buffers for backward and
                # does not use them in it, so there may be a second forward before that.
                tensor.data.copy_(view)

    def equal(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """For each of the tensors, whether it is what was packed, bit for bit."""
        return [
            tensor is not None
            and tensor.dtype == view.dtype
            and tensor.shape == view.shape
            and torch.equal(_bits(tensor), _bits(view))
            for tensor, view in zip(tensors, self.views, strict=True)
        ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: NaN equals itself, and zero is not minus zero."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def broadcast_now(
    tensors: Sequence[torch.Tensor], collectives: Collectives, root: int, limit: int = 32 << 20
) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, at most ``limit`` bytes at a time."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for tensor in [*tensors, None]:
        if batch and (tensor is None or nbytes >= limit or tensor.device != batch[0].device):
            packed = ByteBuffer(batch)
            packed.pack(batch)
            collectives.broadcast(packed.flat, root, label="tensors").wait()
            packed.unpack(batch)
            batch, nbytes = [], 0
        if tensor is not None:
            batch.append(tensor)
            nbytes += tensor.numel() * tensor.element_size()


class Spec(NamedTuple):
    """What workers say about a buffer: its full name, and what is behind it.

    Attributes:
        persistent: whether it is a part of the state dict.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    persistent: bool

    def fits(self, tensor: torch.Tensor | None) -> bool:
        """Whether the tensor has this dtype and shape."""
        return tensor is not None and tensor.dtype == self.dtype and tensor.shape == self.shape


class BufferSync:
    """Keeps a model's buffers those of one worker, the root, as DDP's forward does.

    The root's buffers travel in the background, behind the gradients. As they may be written to
    between that and the next forward, a forward that is to be synchronised begins with two numbers
    from the root: whether what it holds now is what it sent. If not, it sends its buffers again;
    and their names, shapes and dtypes before, if these are not what all know of it.

    A buffer of another shape or dtype than the root's becomes the root's if it is persistent. If
    it is not, as caches are not, each worker keeps its own.

    Args:
        model: whose buffers; looked up anew each time, as forwards make and replace them.
        ignored: names of buffers that each worker keeps for itself.
        collectives: what gradients travel by.
        lockstep: whether workers wait for each other in each iteration; if not, each keeps its own
            buffers, until `level`.
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
        found = list(self._places())
        # The root's, as all workers know it: `distribute` has compared their models.
        self._layout = _specs(found)
        self._known = _named(found)
        self._device = next((p.device for p in (*model.parameters(), *model.buffers())), None)
        self._sent: ByteBuffer | None = None
        self._before: ByteBuffer | None = None
        self._whole = torch.ones(1, dtype=torch.uint8)
        self._news = torch.zeros(2, dtype=torch.int64)
        self._text = torch.empty(0, dtype=torch.uint8)
        self._handle: Handle | None = None
        self._asked: Handle | None = None
        self._root = 0
        self._exchanges = lockstep and collectives.world.size > 1
        if self._exchanges and any(_may_hold(place) for place in found):
            self._open()

    def _places(self) -> list[Place]:
        return list(_places(self._model, self._ignored))

    @property
    def _me(self) -> int:
        """This rank and the root, as they are numbered among all workers."""
        return self._collectives.world.ranks[self._rank]

    @property
    def _peer(self) -> int:
        return self._collectives.world.ranks[self._root]

    def _open(self) -> None:
        # The news must not queue behind gradients.
        self._own = type(self._collectives)(self._collectives.world.open_channel(), "mesh")

    @property
    def channel(self) -> World | None:
        """The channel of its own, to be closed in the end."""
        return None if self._own is None else self._own.world

    def owners(self) -> set[torch.nn.Module]:
        """Return the modules that themselves have buffers that are synchronised."""
        return {place.module for place in self._places() if not place.shared}

    def start(self, root: int = 0) -> None:
        """Send rank ``root``'s buffers to everyone, in the background.

        They are those that all know of. If a forward has replaced one by a tensor of another
        shape, nothing of this counts, and the next forward says so.
        """
        if self._own is None:
            return
        self.apply()
        self._root = root
        now = self._fitting()
        sent = self._packed()
        if self._rank == root:
            self._whole.fill_(None not in now)
            sent.pack([self._whole, *now])
        else:
            if self._before is None:
                self._before = self._room()
            self._before.pack([None, *now])
        label = "buffers after backward"
        self._handle = self._collectives.broadcast(sent.flat, root, label=label)

    def ask(self, root: int) -> None:
        """Hear from ``root`` whether its buffers are others by now; every worker must call it."""
        if self._own is None and not self._begun_late():
            return
        assert self._own is not None
        self.apply()
        self._root = root
        if self._rank == root:
            news, places = _AS_SENT, self._places()
            if _specs(places) != self._layout:
                news = _LAYOUT
                self._describe()
            elif self._sent is None or not all(
                self._sent.equal([self._whole, *self._fitting(places)])
            ):
                news = _VALUES
            self._news[0], self._news[1] = news, self._text.numel()
        self._asked = self._own.broadcast(self._news, root, label="news of buffers")

    def _begun_late(self) -> bool:
        """Whether the model had no buffers before, and every worker's has some now.

        Raises:
            RendezvousError: a worker's has none; names it.
        """
        if not self._exchanges:
            return False
        mine = [spec for spec in _specs(self._places()) if spec.persistent]
        if not mine:
            return False
        self._collectives.world.exchange(f"buffer {mine[0].name}, made after distribute()", True)
        self._open()
        return True

    def apply(self) -> None:
        """Wait for what is under way, if anything, and take it over."""
        handle, self._handle = self._handle, None
        if handle is not None and self._sent is not None:
            handle.wait()
            # What somebody has written since, given another shape or removed (as `prune.remove`
            # does with masks), is this worker's until the next forward.
            if self._rank != self._root and self._before is not None and self._sent.flat[0]:
                self._sent.unpack([None, *self._fitting()], self._before)
        asked, self._asked = self._asked, None
        if asked is None or self._own is None:
            return
        asked.wait()
        news, nbytes = self._news.tolist()
        if news == _LAYOUT:
            self._hear_layout(self._own, nbytes)
        if news != _AS_SENT:
            sent = self._packed()
            if self._rank == self._root:
                self._whole.fill_(1)
                sent.pack([self._whole, *self._fitting()])
            self._own.broadcast(sent.flat, self._root, label="buffers").wait()
        if self._rank != self._root and self._sent is not None:
            self._take_over(self._sent.views[1:])

    def level(self) -> None:
        """Take over rank 0's now; every worker must call it."""
        if not self._layout and not _specs(self._places()):
            return  # where workers come back alone, there is nobody to send to
        with torch.no_grad():
            self._root = 0
            if self._rank == 0:
                self._describe()
                self._news[1] = self._text.numel()
            self._collectives.broadcast(self._news, 0, label="news of buffers").wait()
            self._hear_layout(self._collectives, int(self._news[1]))
            values = [
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                if own is None
                else own
                for spec, own in zip(self._layout, self._fitting(), strict=True)
            ]
            broadcast_now(values, self._collectives, root=0)
            if self._rank != 0:
                self._take_over(values)

    def tensors(self) -> list[torch.Tensor]:
        """Return today's buffers, each once."""
        places = self._places()
        return [place.tensor for place in places if place.tensor is not None and not place.shared]

    def _fitting(self, places: Iterable[Place] = ()) -> list[torch.Tensor | None]:
        """Return this worker's buffer for each of the layout; None where it has another or none."""
        named = {place.name: place.tensor for place in places or self._places()}
        tensors = ((spec, named.get(spec.name)) for spec in self._layout)
        return [tensor if spec.fits(tensor) else None for spec, tensor in tensors]

    def _packed(self) -> ByteBuffer:
        """Return the room for what the root sends, which stays while its layout does."""
        if self._sent is None:
            self._sent = self._room()
        return self._sent

    def _room(self) -> ByteBuffer:
        """Make room for a byte that says whether the rest counts, and for what the layout names."""
        meta = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self._layout]
        return ByteBuffer([self._whole, *meta], self._device)

    def _describe(self) -> None:
        """Write down which buffers this worker has, to be sent."""
        places = self._places()
        self._text = _text_of(_specs(places), _named(places))

    def _hear_layout(self, collectives: Collectives, nbytes: int) -> None:
        """Take over the root's layout, which it sends in so many bytes.

        Raises:
            PeerError: what arrives is none.
        """
        try:
            if not 0 < nbytes <= _LONGEST_LAYOUT:
                raise ValueError(nbytes)
            if self._rank != self._root:
                self._text = torch.empty(nbytes, dtype=torch.uint8)
            collectives.broadcast(self._text, self._root, label="layout of buffers").wait()
            self._layout, self._known = _parsed(self._text)
        except ValueError:
            raise PeerError(
                f"rank {self._me}: rank {self._peer} sent a malformed list of buffers; all workers "
                "have to run the same wingbeat"
            ) from None
        self._sent = self._before = None

    def _take_over(self, values: Sequence[torch.Tensor]) -> None:
        """Give this worker's buffers the root's values.

        Raises:
            UsageError: a persistent buffer that only this worker has, or that has no place here.
        """
        found = {place.name: place for place in self._places()}
        self._refuse_only_here(found.values())
        for spec, value in zip(self._layout, values, strict=True):
            own = found[spec.name].tensor if spec.name in found else None
            if own is not None and spec.fits(own):
                own.data.copy_(value)
            elif spec.persistent:
                self._replace(spec, value if own is None else value.to(own.device))

    def _replace(self, spec: Spec, value: torch.Tensor) -> None:
        """Register the root's buffer here.

        Raises:
            UsageError: there is no module of that name, or its attribute is no buffer.
        """
        prefix, _, key = spec.name.rpartition(".")
        try:
            module = self._model.get_submodule(prefix)
            module.register_buffer(key, value.clone(), persistent=True)
        except (AttributeError, KeyError) as err:
            name = printable(spec.name, LONGEST_ERROR)
            raise UsageError(
                f"buffer {name!r}: rank {self._peer} has one of shape {spec.shape}, and rank "
                f"{self._me} no place for it ({first_line(err)}): register it on all ranks alike, "
                "with None if it gets its tensor later"
            ) from None

    def _refuse_only_here(self, places: Iterable[Place]) -> None:
        """Raise a `UsageError` if a persistent buffer here is none of the root's."""
        for place in places:
            if place.tensor is None or not place.persistent or place.name in self._known:
                continue
            raise UsageError(
                f"buffer {place.name!r}: rank {self._me} has one of shape "
                f"{tuple(place.tensor.shape)}, and rank {self._peer} has none: make it in the same "
                "forward on all ranks, or register it with persistent=False if each worker has its "
                "own"
            )


class Place(NamedTuple):
    """A name under which a module keeps a buffer.

    Attributes:
        name: in full.
        shared: whether another name, which comes before, has the same tensor.
        persistent: whether it is a part of the state dict.
    """

    name: str
    module: torch.nn.Module
    tensor: torch.Tensor | None
    shared: bool
    persistent: bool


def _places(model: torch.nn.Module, ignored: Collection[str]) -> Iterator[Place]:
    """Yield all names of buffers, also those without a tensor, which ``named_buffers`` omits."""
    modules: set[int] = set()
    tensors: set[int] = set()  # the hash of a tensor takes longer than all the rest
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
    """Return the names that have a tensor, shared ones too."""
    return frozenset(place.name for place in places if place.tensor is not None)


def _may_hold(place: Place) -> bool:
    """Whether a buffer may get a tensor; those of torch's own layers without one never do."""
    return place.tensor is not None or not type(place.module).__module__.startswith("torch.nn.")


def _text_of(layout: Sequence[Spec], known: Collection[str]) -> torch.Tensor:
    said = [
        [spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape), spec.persistent]
        for spec in layout
    ]
    text = json.dumps([said, sorted(known)]).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _parsed(text: torch.Tensor) -> tuple[list[Spec], frozenset[str]]:
    """Return a layout, and all names of buffers that the root has.

    Raises:
        ValueError: the text says something else.
    """
    try:
        said, known = json.loads(bytes(text.tolist()))
        layout = [
            Spec(_is(str, name), getattr(torch, _is(str, dtype)), _shape(shape), _is(bool, kept))
            for name, dtype, shape, kept in said
        ]
        names = frozenset(_is(str, name) for name in known)
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise ValueError(text) from None
    if not all(isinstance(spec.dtype, torch.dtype) and spec.name in names for spec in layout):
        raise ValueError(text)
    return layout, names


def _shape(said: Any) -> tuple[int, ...]:
    shape = tuple(_is(int, size) for size in _is(list, said))
    if any(size < 0 for size in shape):
        raise ValueError(said)
    return shape


def _is(kind: type[T], said: Any) -> T:
    if type(said) is not kind:
        raise ValueError(said)
    return said
