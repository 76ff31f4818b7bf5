"""What a process tells its peers of itself through the rendezvous store, and the checks of it."""

from __future__ import annotations

import ipaddress
import json
import re
import struct
from dataclasses import dataclass
from typing import Any, TypeVar

from zmq.utils import z85

from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.messages.carrier import CLASSES

_T = TypeVar("_T")

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key in Z85."""

_ENDPOINT = re.compile(r"tcp://([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Card:
    """Where a process is and how to speak to it.

    Attributes:
        host: its host and that host's interfaces.
        uses: the addresses that it listens on, in the order of the interfaces' numbers.
        session: the random number in each of its headers.
        key: its public key in Z85; empty if it sends in the clear.
        listens: TCP endpoints by interface and class.
        message: bytes that a payload may have.
        window: bytes that a flow may hold.
    """

    host: Host
    uses: tuple[str, ...]
    session: int
    key: str
    listens: tuple[tuple[str, ...], ...]
    message: int
    window: int

    @property
    def interfaces(self) -> list[Interface]:
        """The interfaces that it listens on."""
        by_address = {i.address: i for i in self.host.interfaces}
        return [by_address[address] for address in self.uses]

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(
            {
                "host": self.host.to_json(),
                "uses": self.uses,
                "session": self.session,
                "key": self.key,
                "listens": self.listens,
                "message": self.message,
                "window": self.window,
            }
        )

    @staticmethod
    def from_json(text: str) -> Card:
        """Check and rebuild what a peer has published.

        Raises:
            ValueError: it is not what `to_json` makes.
        """
        try:
            data = _of(dict, json.loads(text))
            uses = tuple(_of(str, address) for address in _of(list, data["uses"]))
            listens = tuple(
                tuple(_endpoint(each) for each in _of(list, of))
                for of in _of(list, data["listens"])
            )
            card = Card(
                Host.from_json(data["host"]),
                uses,
                _number(data["session"], 0, 2**64 - 1),
                _key(data["key"]),
                listens,
                _number(data["message"], 1, 2**31 - 1),
                _number(data["window"], 1, 2**63 - 1),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
            raise ValueError(f"malformed card: {err!r:.80}") from None
        addresses = {i.address for i in card.host.interfaces}
        fits = (
            addresses.issuperset(uses)
            and len(set(uses)) == len(uses) == len(listens) > 0
            and {len(of) for of in listens} <= {len(listens[0])}
            and 1 <= len(listens[0]) <= CLASSES
        )
        if not fits:
            raise ValueError(f"malformed card: {data!s:.80}")
        return card


def _of(kind: type[_T], value: Any) -> _T:
    """Return ``value``, which has to be of that very type: true is no number."""
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _number(value: Any, least: int, most: int) -> int:
    if not least <= _of(int, value) <= most:
        raise ValueError(f"{value!r:.40} is not from {least} to {most}")
    return int(value)


def _key(value: Any) -> str:
    """Check a public key, which ZeroMQ refuses in the midst of connecting if it is none."""
    if _of(str, value):
        if _KEY.fullmatch(value) is None:
            raise ValueError(f"malformed key: {value!r:.60}")
        try:
            z85.decode(value.encode())
        except struct.error:  # five characters that are more than 32 bits
            raise ValueError(f"malformed key: {value!r:.60}") from None
    return str(value)


def _endpoint(value: Any) -> str:
    match = _ENDPOINT.fullmatch(_of(str, value))
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"malformed endpoint: {value!r:.80}")
    address = ipaddress.ip_address(match[1].strip("[]"))
    return f"tcp://{in_brackets(str(address))}:{int(match[2])}"


def in_brackets(address: str) -> str:
    """Return an address as an endpoint has it: IPv6's in brackets, which tell it from the port."""
    return f"[{address}]" if ":" in address else address
