"""Services that the process of `wingbeat store` starts, so that they outlive every replica.

A worker writes its request into the store, at the first free number. The process that serves the
store reads the requests in this order, and starts each service as a worker would, with access to
the part of the store that the request names.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.observe.log import log
from wingbeat.schema import MalformedMessage, Text, parse_json, printable
from wingbeat.transport.served_store import StoreUnavailable
from wingbeat.transport.services import ProcessService, Service, ServiceConfig
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import Authenticator, RawStore, TorchStore, job_key, part_of

MAX_SERVICES = 64
"""Maximum services that run at the same time; further requests are refused."""

_MAX_REQUESTS = 1 << 20
_CONTEXT = "services"
_STARTED = "started"

ANSWER_S = 30.0
"""Maximum seconds to wait for the answer to a request."""

Configs = Mapping[str, Callable[[str], ServiceConfig]]
"""By module: what parses the configuration of a service, or raises a `MalformedMessage`."""


class ServiceRequest(NamedTuple):
    """A service to start.

    Attributes:
        module: as in `ServiceConfig`.
        config: its configuration, as JSON.
        path: the part of the store that it works with.
        context: of the authenticator of that part; empty without a job key.
        serial: a random text, which distinguishes equal requests.
    """

    module: Annotated[str, Text(200)]
    config: Annotated[str, Text(1 << 20)]
    path: Annotated[str, Text(2000)]
    context: Annotated[str, Text(2000)]
    serial: Annotated[str, Text(100)]


class HostedService:
    """A `Service` that another process runs: nothing of it ends with this worker."""

    def ended(self) -> str | None:
        """Return None: it is not known."""
        return None

    def close(self, seconds: float) -> None:
        """Do nothing: it ends after its workers."""

    def kill(self) -> None:
        """Do nothing: others use it."""


def request_service(root: RawStore, config: ServiceConfig, store: TorchStore) -> HostedService:
    """Have the process that serves the store ``root`` start a service; wait until it has.

    ``store`` is the part that it works with. A `RendezvousError` if it was not started.
    """
    signed = _requests(root, job_key(os.environ))
    context = "" if store.authenticator is None else store.authenticator.context
    serial = secrets.token_hex(8)
    text = json.dumps(ServiceRequest(config.module, config.to_json(), store.path, context, serial))
    try:
        for number in range(_MAX_REQUESTS):
            if signed.claim(_name(number), text) == text:
                break
        answer = signed.get(_answer(number), min(config.timeout, ANSWER_S))
    except TimeoutError as error:
        raise RendezvousError(
            f"{config.me} was not started by the process that serves the store: {error}; serve it "
            "by `wingbeat store`, with the WINGBEAT_JOB_KEY of the workers, or none if they have "
            "none"
        ) from None
    if answer != _STARTED:
        raise RendezvousError(
            f"{config.me} was not started by `wingbeat store`: {printable(answer[:200])}; read "
            "its log"
        )
    return HostedService()


class ServiceHost:
    """Starts the services that workers request, in the process that serves the store.

    Args:
        root: the store, in a connection of its own.
        key: the job's key, with which requests are signed; None without one.
        configs: the services that may be started.
        start: starts one.
    """

    def __init__(
        self,
        root: RawStore,
        key: bytes | None,
        configs: Configs,
        start: Callable[[ServiceConfig, TorchStore], Service] = ProcessService,
    ) -> None:
        self._root, self._key, self._configs, self._start = root, key, configs, start
        self._requests = _requests(root, key)
        self._next = 0
        self.running: list[Service] = []

    def poll(self) -> None:
        """Start what was requested since the last call, and drop what has ended."""
        for service in [each for each in self.running if each.ended() is not None]:
            log.info("%s", service.ended())
            service.close(0.0)
            self.running.remove(service)
        with contextlib.suppress(StoreUnavailable):  # full, or too busy to answer in time
            while (text := self._read(_name(self._next))) is not None:
                self._answer(text)

    def _answer(self, text: str) -> None:
        place, answer = _answer(self._next), _STARTED
        # A former process has answered, whose journal this store has restored.
        answered = self._read(place) is not None
        self._next += 1
        if answered:
            return
        try:
            self._serve(parse_json(ServiceRequest, text, "a request"))
        except (MalformedMessage, UsageError, OSError, RuntimeError) as error:
            answer = first_line(error)
            log.warning("a requested service is not started: %s", answer)
        self._requests.set(place, answer)

    def close(self) -> None:
        """End all services."""
        for service in self.running:
            service.kill()
        self.running.clear()

    def _read(self, key: str) -> str | None:
        try:
            return self._requests.peek(key)
        except TimeoutError:  # rejected: a worker with the job's key overwrites it
            return None

    def _serve(self, request: ServiceRequest) -> None:
        parse = self._configs.get(request.module)
        if parse is None:
            raise MalformedMessage(f"module {request.module!r:.80} is not one of a service")
        if len(self.running) >= MAX_SERVICES:
            raise UsageError(f"{MAX_SERVICES} services run already")
        config = parse(request.config)
        store = part_of(self._root, request.path)
        auth = None if self._key is None else Authenticator(self._key, request.context)
        self.running.append(self._start(config, TorchStore(store, auth)))
        log.info("%s was started", config.me)


def _requests(root: RawStore, key: bytes | None) -> TorchStore:
    return TorchStore(root, None if key is None else Authenticator(key, _CONTEXT))


def _name(number: int) -> str:
    return f"wingbeat/services/{number}"


def _answer(number: int) -> str:
    return f"wingbeat/services/{number}/answer"
