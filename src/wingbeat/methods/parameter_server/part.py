"""A slice as a worker pushes it and has its sum put in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wingbeat.methods.parameter_server.protocol import Ids, link_of
from wingbeat.transport.messages.endpoint import Message


class Form(Protocol):
    """How a slice travels, where that is not as it lies in memory."""

    @property
    def dtype(self) -> str:
        """What the messages with its gradients say."""

    @property
    def nbytes(self) -> int:
        """The bytes of its gradients."""

    def packed(self) -> memoryview:
        """Return its gradients; asked for once, when they are sent."""

    def unpack(self, dtype: str, payload: memoryview) -> None:
        """Put what a server has sent in its place.

        Raises:
            ValueError: no server of this job can have made it; nothing is written.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """A slice as one request has it.

    Attributes:
        server: the number of its mailbox.
        ids: which slice of which plan and round, and how its sum is to come.
        memory: its gradients, where the sum is put.
        urgency: the class in which the gradients are pushed, 0 the most urgent.
        position: its place in the order of forward.
        form: how it travels; None for as it is in memory.
    """

    server: int
    ids: Ids
    memory: memoryview
    urgency: int
    position: int
    form: Form | None = None

    @property
    def link(self) -> int:
        """By which link it travels, both ways."""
        return link_of(self.ids.wish)

    @property
    def nbytes(self) -> int:
        """The bytes of its gradients as they travel."""
        return len(self.memory) if self.form is None else self.form.nbytes

    def put(self, message: Message, dtype: str) -> bool:
        """Put what a server has sent in its place; return False if it is not what was asked for.

        Args:
            message: from whomever.
            dtype: of the elements in memory.
        """
        if self.server != message.peer:
            return False
        if self.form is not None:
            try:
                self.form.unpack(message.dtype, message.payload)
            except ValueError:
                return False
            return True
        if message.dtype != dtype or len(message.payload) != len(self.memory):
            return False
        self.memory[:] = message.payload
        return True
