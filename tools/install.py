"""Install packages into this interpreter's environment as pip does, but several at a time.

    python tools/install.py -c constraints.txt -e '.[dev]'

All words are those of ``pip install``. uv does the work, with pip's settings of index, links, proxy
and certificate: pip downloads and unpacks one package after the other, and those of PyTorch have
gigabytes. If uv cannot be installed, or fails, pip does the work.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

PIP = [sys.executable, "-m", "pip"]
QUIET = ["--disable-pip-version-check", "--no-input"]

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""Settings of pip, and uv's variables for the same."""


def variables_for_uv(settings: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of uv that have the values of pip's settings.

    Args:
        settings: Lines of ``pip config list``, such as ``global.index-url='https://...'``.
        environment: Variables that are set. These are kept.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # of several indices, as pip chooses
    lines = [line.partition("=") for line in settings]
    lines.sort(key=lambda line: line[0].startswith(":env:"))  # variables count more than files
    for name, _, value in lines:
        section, _, setting = name.rpartition(".")
        if setting in VARIABLES and section in ("global", "install", ":env:"):
            separator = "," if setting == "find-links" else " "
            found[VARIABLES[setting]] = separator.join(str(ast.literal_eval(value)).split())
    return {name: value for name, value in found.items() if name not in environment}


def install_with_uv(words: list[str]) -> bool:
    """Whether uv has installed what ``pip install`` with these words does."""
    if subprocess.run([*PIP, "install", *QUIET, "-q", "-c", "constraints.txt", "uv"]).returncode:
        return False
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True)
    environment = variables_for_uv(listed.stdout.splitlines(), os.environ)
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--compile-bytecode",
        "--python",
        sys.executable,
        *words,
    ]
    return subprocess.run(command, env={**os.environ, **environment}).returncode == 0


def main() -> int:
    """Install with uv, else with pip; the status of the one that ended it."""
    words = sys.argv[1:]
    if install_with_uv(words):
        return 0
    print("uv could not install this; pip does, which takes longer", file=sys.stderr)
    return subprocess.run([*PIP, "install", *QUIET, *words]).returncode


if __name__ == "__main__":
    sys.exit(main())
