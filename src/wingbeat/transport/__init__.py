"""Over what: one process group per network interface; NCCL on GPUs; loopback for tests."""

from wingbeat.transport.rendezvous import init, shutdown
from wingbeat.transport.world import World, current

__all__ = ["World", "current", "init", "shutdown"]
