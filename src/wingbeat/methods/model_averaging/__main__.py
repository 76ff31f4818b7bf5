"""The group generator's process: ``python -m wingbeat.methods.model_averaging CONFIG``."""

from __future__ import annotations

import sys

from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.schema import parse_json
from wingbeat.transport.services import run_service

if __name__ == "__main__":
    run_service(parse_json(GeneratorConfig, sys.argv[1]))
