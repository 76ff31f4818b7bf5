"""Of several that publish under one key the first is right."""

from __future__ import annotations

import torch.distributed as dist

from helpers.ports import free_port
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.store import AtomicStore
from wingbeat.transport.torch_store import TorchStore


def test_first_claim_wins() -> None:
    tcp = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    stores: list[AtomicStore] = [TorchStore(dist.PrefixStore("a", tcp)), Switchboard()]
    for store in (*stores, TorchStore(dist.HashStore())):
        assert isinstance(store, AtomicStore)
        assert store.claim("key", "first") == "first"
        assert store.claim("key", "second") == "first"
        assert store.has("key")
        assert store.get("key", 1.0) == "first"
