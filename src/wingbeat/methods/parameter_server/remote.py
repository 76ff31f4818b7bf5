"""The optimizer on the servers, as one worker speaks with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from wingbeat.methods.parameter_server.client import Client
from wingbeat.methods.parameter_server.documents import Document, messages
from wingbeat.methods.parameter_server.launch import Hosting
from wingbeat.methods.parameter_server.part import Part
from wingbeat.methods.parameter_server.protocol import NO_ROUND, Ids, Kind
from wingbeat.methods.parameter_server.request import Request
from wingbeat.methods.parameter_server.requests import Requests
from wingbeat.methods.parameter_server.slicing import Slice

_FIRST = -1
"""The place in the order of forward of what goes before all gradients."""


class RemoteOptimizer:
    """Tells the servers what they need, and asks for what they have, slice by slice.

    All that is told goes in the most urgent class, so that a server hears it in this order.

    Args:
        hosting: the way to the servers.
        requests: the plan in force.

    Attributes:
        updates: how many updates the servers were told to make.
        landing: by bucket, where its parameters are to be put, unless into its buffer.
        unused: the parameters, by the index of their slots, whose sums the servers will not use in
            the next update, as no worker has a gradient for them.
    """

    def __init__(self, hosting: Hosting, requests: Requests) -> None:
        self._hosting, self._requests = hosting, requests
        self._client: Client = hosting.client
        self.updates = 0
        self.landing: dict[int, torch.Tensor] = {}
        self.unused: frozenset[int] = frozenset()

    @property
    def plan(self) -> int:
        """The number of the plan in force."""
        return self._requests.plan

    def slices(self) -> list[Slice]:
        """Return all slices of the plan in force; their numbers are their places."""
        return self._requests.slices()

    def hold(self, each: Slice, words: dict[str, Any], data: torch.Tensor) -> None:
        """Give a server parameters of a slice, with the optimizer's state if words tell of it.

        Args:
            each: the slice.
            words: as `shard_optimizer.Applier.hold` takes them; none: values alone.
            data: the arrays, as bytes; must not change before they have arrived.
        """
        ids = Ids(self.plan, each.number, self.updates, 0)
        for count, payload in enumerate(messages(words, [_bytes_of(data)], self._hosting.message)):
            self._send(Kind.MORE if count else Kind.HOLD, each.server, ids, payload)

    def final(self, each: Slice, gradients: torch.Tensor) -> None:
        """Give a server gradients of a slice to be used in the next update, in place of the sum."""
        ids = Ids(self.plan, each.number, self.updates, 0)
        self._send(Kind.FINAL, each.server, ids, _bytes_of(gradients))

    def ready(self) -> None:
        """Tell the servers that this worker has held all that it is to: they wait for all."""
        for server in range(self._hosting.count):
            self._send(Kind.READY, server, Ids(self.plan, 0, 0, 0), b"")

    def step(self, words: bytes, *, summed: bool, unasked: bool) -> None:
        """Tell the servers to make the update that `updates` counts already.

        Args:
            words: its settings, in JSON.
            summed: whether by the sums of the last round, or by what was sent as `final`.
            unasked: whether parameters are to come by themselves.
        """
        number = self._requests.round() if summed else NO_ROUND
        for server in range(self._hosting.count):
            self._send(Kind.STEP, server, Ids(self.plan, number, self.updates, unasked), words)

    def collect(self, plan: int, slices: Sequence[Slice]) -> Iterable[tuple[Slice, Document]]:
        """Ask for the optimizer's state of some slices, and wait for it.

        Raises:
            PeerError: a server or a worker has failed.
        """
        request = self.ask(plan, slices)
        request.wait()
        for each, part in zip(slices, request.parts, strict=True):
            yield each, request.documents.pop(part.ids[:3])

    def ask(self, plan: int, slices: Sequence[Slice]) -> Request:
        """Ask for the optimizer's state of some slices, without a wait."""
        parts = [
            Part(
                self._hosting.number(each.server),
                Ids(plan, each.number, self.updates, 0),
                memoryview(b""),
                0,
                _FIRST,
            )
            for each in slices
        ]
        return self._client.start(Kind.STATE, "", parts, "the optimizer's state")

    def _send(self, kind: Kind, server: int, ids: Ids, payload: Any) -> Request:
        part = Part(self._hosting.number(server), ids, memoryview(payload), 0, _FIRST)
        return self._client.start(kind, "", [part], "what the servers are told")


def _bytes_of(data: torch.Tensor) -> memoryview:
    view: memoryview = data.detach().view(torch.uint8).numpy().data
    return view
