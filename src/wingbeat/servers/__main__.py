"""A server's process: ``python -m wingbeat.servers CONFIG``, started by a worker."""

from __future__ import annotations

import sys

from wingbeat.servers.config import ServerConfig
from wingbeat.transport.services import run_service

if __name__ == "__main__":
    run_service(ServerConfig.from_json(sys.argv[1]))
