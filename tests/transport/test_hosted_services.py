"""Services that the process of `wingbeat store` starts for workers."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.schema import parse_json
from wingbeat.transport import hosted_services
from wingbeat.transport.hosted_services import ServiceHost, ServiceRequest, request_service
from wingbeat.transport.served_store import StoreUnavailable
from wingbeat.transport.services import ServiceConfig
from wingbeat.transport.torch_store import Authenticator, ColumnStore, TorchStore

KEY = "a key of a job, long enough"
CONFIG = GeneratorConfig(
    room="groups1", host_of=(0, 1), interfaces=("lo",), timeout=5.0, rules=Rules()
)
CONFIGS = {CONFIG.module: lambda text: parse_json(GeneratorConfig, text)}


@dataclass
class Started:
    """A service that a host has started, and that ends when it is told to."""

    config: ServiceConfig
    store: TorchStore
    how: str | None = None
    calls: list[str] = field(default_factory=list)

    def ended(self) -> str | None:
        return self.how

    def close(self, seconds: float) -> None:
        self.calls.append("close")

    def kill(self) -> None:
        self.calls.append("kill")


def host_of(root: dist.Store, key: str | None = None) -> ServiceHost:
    return ServiceHost(root, key and key.encode(), CONFIGS, Started)  # type: ignore[arg-type]


@pytest.fixture(params=[None, KEY])
def key(request: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.delenv("WINGBEAT_JOB_KEY_FILE", raising=False)
    monkeypatch.delenv("WINGBEAT_JOB_KEY", raising=False)
    if request.param:
        monkeypatch.setenv("WINGBEAT_JOB_KEY", request.param)
    return request.param  # type: ignore[no-any-return]


def request(host: ServiceHost, root: dist.Store, own: TorchStore) -> None:
    """Request a service in a thread while the host polls."""
    with ThreadPoolExecutor() as pool:
        future = pool.submit(request_service, root, CONFIG, own)
        while not future.done():
            host.poll()
            time.sleep(0.001)
        future.result()


def part(root: dist.Store, key: str | None) -> TorchStore:
    """The store of a column of a job, as workers use it."""
    auth = None if key is None else Authenticator(key.encode(), "jobs/a/name")
    job = TorchStore(dist.PrefixStore("jobs/a", root), auth, "jobs/a")
    return ColumnStore(job, "column/0/0").own


def test_requested_service_works_with_the_same_part_of_the_store(key: str | None) -> None:
    root = dist.HashStore()
    host, own = host_of(root, key), part(root, key)
    host.poll()
    assert host.running == []
    request(host, root, own)
    (started,) = host.running
    assert isinstance(started, Started)
    assert started.config == CONFIG
    started.store.set("groups1/generator", "here")
    assert own.get("groups1/generator", 0.0) == "here"


def test_requests_start_services_once_each_and_ended_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosted_services, "MAX_SERVICES", 2)
    root = dist.HashStore()
    host, own = host_of(root), part(root, None)
    for _ in range(2):
        request(host, root, own)
    with pytest.raises(RendezvousError, match="not started by `wingbeat store`: 2 services run"):
        request(host, root, own)
    assert len(host.running) == 2
    first, second = host.running
    first.how = "ended"  # type: ignore[attr-defined]
    request(host, root, own)
    assert host.running[0] is second
    assert len(host.running) == 2
    assert first.calls == ["close"]  # type: ignore[attr-defined]
    host.close()
    assert second.calls == ["kill"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["[", "7", json.dumps(["os", "{}", "", "", ""]), json.dumps([CONFIG.module, "{}", "", "", ""])],
)
def test_malformed_request_starts_nothing_and_does_not_block_the_next(text: str) -> None:
    root = dist.HashStore()
    host = host_of(root)
    root.set("wingbeat/services/0", text)
    request(host, root, part(root, None))
    assert [each.config for each in host.running] == [CONFIG]  # type: ignore[attr-defined]


def test_request_without_the_jobs_key_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINGBEAT_JOB_KEY", KEY)
    root = dist.HashStore()
    host = host_of(root, KEY)
    root.set("wingbeat/services/0", json.dumps([CONFIG.module, CONFIG.to_json(), "", "", ""]))
    host.poll()
    assert host.running == []
    request(host, root, part(root, KEY))
    assert len(host.running) == 1


def test_request_that_is_not_served_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_services, "ANSWER_S", 0.1)
    root = dist.HashStore()
    with pytest.raises(RendezvousError, match=r"generator .* serve it by `wingbeat store`"):
        request_service(root, CONFIG, part(root, None))


@pytest.mark.parametrize("failing", ["compare_set", "set"])
def test_store_that_is_full_or_does_not_answer_ends_no_host_of_services(failing: str) -> None:
    """Each request is served once, and later ones when the store answers again."""

    class Failing:
        fails = False

        def __init__(self, inner: dist.Store) -> None:
            self.inner = inner

        def under(self, prefix: str) -> Failing:
            return Failing(dist.PrefixStore(prefix, self.inner))

        def __getattr__(self, name: str) -> Any:
            if name == failing and Failing.fails:
                raise StoreUnavailable("the store is full")
            return getattr(self.inner, name)

    root = dist.HashStore()
    host, own = host_of(Failing(root)), part(root, None)  # type: ignore[arg-type]
    request(host, root, own)
    Failing.fails = True
    again = ServiceRequest(CONFIG.module, CONFIG.to_json(), "jobs/a", "", "2")
    root.set("wingbeat/services/1", json.dumps(again))
    host.poll()
    Failing.fails = False
    host.poll()
    assert len(host.running) == 2
    request(host, root, own)
    assert len(host.running) == 3
