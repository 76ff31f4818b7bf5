"""Which connections between ranks are encrypted, and the keys of those that are."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Mapping, Sequence

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.transport.torch_store import KEY_VARIABLE

VARIABLE = "WINGBEAT_ENCRYPTED"
"""Environment variable: 1 to encrypt all connections, 0 for none."""

_KEY_BYTES = 16


def choose(encrypted: bool | None, env: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether to encrypt; None: between hosts. The argument, else the environment.

    Raises a `UsageError` for another value of the variable.
    """
    text = env.get(VARIABLE)
    if encrypted is not None or text is None:
        return encrypted
    if text not in ("0", "1"):
        raise UsageError(f"{VARIABLE}={text!r} in the environment: allowed are 0 and 1")
    return text == "1"


def check(
    rank: int,
    choices: Sequence[bool | None],
    addresses: Sequence[Sequence[str]],
    job_key: bytes | None,
) -> None:
    """Raise a `UsageError` if the ranks chose differently, or this processor cannot encrypt.

    ``addresses`` are those of each rank, one for each interface. Logs if the store has the keys.
    """
    own = choices[rank]
    for peer, other in enumerate(choices):
        if other != own:
            raise UsageError(
                f"rank {rank} has encrypted={own} and rank {peer} encrypted={other}: set the same "
                f"on all workers, in wingbeat.init(encrypted=...) or {VARIABLE}"
            )
    if own is False or (own is None and all(each == addresses[rank] for each in addresses)):
        return
    if not _native.can_encrypt():
        raise UsageError(
            f"rank {rank}: this processor has no AES instructions, which encryption needs: set "
            f"encrypted=False, or {VARIABLE}=0, on all workers"
        )
    if job_key is None and rank == 0:
        log.info(
            "connections are encrypted with keys from the rendezvous store: who reads the store "
            "can decrypt them; set %s on all workers",
            KEY_VARIABLE,
        )


def keys(
    encrypted: bool | None,
    connection: socket.socket,
    key: bytes,
    connecting: bool,
    handshake: bytes,
) -> bytes:
    """Return the keys for sending and for receiving of one end, 16 bytes each; empty if plain.

    ``handshake`` is what both ends have sent, different for each connection. ``key`` is expanded as
    by HKDF-SHA256 (RFC 5869).
    """
    if encrypted is None:  # within a host both ends have one address
        encrypted = connection.getsockname()[0] != connection.getpeername()[0]
    if not encrypted:
        return b""
    by_connecting, by_accepting = (
        hmac.digest(key, b"encrypt " + role + handshake + b"\1", "sha256")[:_KEY_BYTES]
        for role in (b"connect", b"accept")
    )
    return by_connecting + by_accepting if connecting else by_accepting + by_connecting
