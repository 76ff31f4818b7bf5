"""The group generator's process: ``python -m wingbeat.methods.model_averaging CONFIG``."""

from __future__ import annotations

import sys

from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.transport.services.process import main

if __name__ == "__main__":
    main(GeneratorConfig.from_json(sys.argv[1]))
