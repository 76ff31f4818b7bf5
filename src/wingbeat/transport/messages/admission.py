"""Who may connect: asked by ZeroMQ for each connection's key (RFC 27, ZAP), in a thread of its own.

A handshake has to go on while its user computes, so nobody waits for the user's thread here. It
also counts the connections that did not come that far.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils import z85

from wingbeat.transport.background import BackgroundThread

_HANDLER = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

_FAILED: dict[int, str] = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "key",
}
_BEGUN = (int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_CONNECTED))
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ENDED = int(zmq.EVENT_DISCONNECTED)


class Admission:
    """Answers ZeroMQ's questions about keys, until closed.

    Attributes:
        ended: how many connections have ended.
        cut: the endpoints where the last connection has ended, as whoever has connected to them
            names them.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._failed: Counter[str] = Counter()
        self._begun = self._succeeded = self.ended = 0
        self.cut: set[str] = set()
        self._keys: Mapping[bytes, int] = {}
        self._context = context
        self._ended = False
        self._handler = context.socket(zmq.ROUTER)
        self._handler.linger = 0
        self._handler.bind(_HANDLER)
        self._end, self._told = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._told.bind(f"inproc://wingbeat-admission-{id(self)}")
        self._end.connect(f"inproc://wingbeat-admission-{id(self)}")
        self._watched: list[Any] = []
        self._thread = BackgroundThread(self._run, "wingbeat-admission")

    @property
    def refused(self) -> Counter[str]:
        """How many connections were none in the end, by the reason.

        Those that ended, or have lasted until now, without a handshake, count as "unfinished".
        """
        failed = Counter(self._failed)
        unfinished = self._begun - self._succeeded - sum(failed.values())
        return failed + Counter(unfinished=max(0, unfinished))

    def admit(self, keys: Mapping[bytes, int]) -> None:
        """Admit connections that prove one of these keys, as the peer of that number."""
        self._keys = dict(keys)
        if self._thread.ident is None:
            self._thread.start()

    @property
    def failure(self) -> str:
        """How the thread has ended by an exception, so that nobody can connect; or empty."""
        return self._thread.failure

    def watch(self, socket: Any) -> None:
        """Count the handshakes that fail on a socket, and connections that end; before `admit`."""
        events = _SUCCEEDED | _ENDED
        for event in (*_FAILED, *_BEGUN):
            events |= event
        self._watched.append(socket.get_monitor_socket(events))

    def close(self) -> None:
        """End the thread. May be called again."""
        if self._ended:
            return
        self._ended = True
        if self._thread.ident is not None:
            self._end.send(b"")
            self._thread.join()
        for socket in (self._handler, self._end, self._told, *self._watched):
            socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._handler, self._told, *self._watched):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._told in ready:
                return
            if self._handler in ready:
                self._answer(self._handler.recv_multipart())
            for watched in self._watched:
                if watched in ready:
                    self._count(watched)

    def _answer(self, request: list[bytes]) -> None:
        """Answer one request: who it is if the key is known, and no otherwise."""
        try:
            sender, _, version, number, _, _, _, mechanism, key = request[:9]
        except ValueError:
            return
        peer = None
        if version == _VERSION and mechanism == b"CURVE":
            peer = self._keys.get(z85.encode(key))
        verdict = (b"400", b"unknown key", b"") if peer is None else (b"200", b"OK", b"%d" % peer)
        reply = [sender, b"", _VERSION, number, *verdict, b""]
        with contextlib.suppress(zmq.ZMQError):
            self._handler.send_multipart(reply, zmq.DONTWAIT)

    def _count(self, watched: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):
            said, endpoint = watched.recv_multipart(zmq.DONTWAIT)
            event = int.from_bytes(said[:2], "little")
            if event == _ENDED:
                self.cut.add(endpoint.decode())
            elif event == _SUCCEEDED:
                self.cut.discard(endpoint.decode())
            self._begun += event in _BEGUN
            self._succeeded += event == _SUCCEEDED
            self.ended += event == _ENDED
            if event in _FAILED:
                self._failed[_FAILED[event]] += 1
