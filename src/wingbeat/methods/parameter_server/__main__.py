"""The server process: ``python -m wingbeat.methods.parameter_server CONFIG``."""

from __future__ import annotations

import sys

from wingbeat.methods.parameter_server.server import ServerConfig
from wingbeat.transport.services.process import main

if __name__ == "__main__":
    main(ServerConfig.from_json(sys.argv[1]))
