"""The server process: ``python -m wingbeat.methods.parameter_server CONFIG``."""

from __future__ import annotations

import sys

from wingbeat.methods.parameter_server.server import ServerConfig
from wingbeat.transport.services import run_service

if __name__ == "__main__":
    run_service(ServerConfig.from_json(sys.argv[1]))
