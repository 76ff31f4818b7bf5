"""Services of a pool's workers are forked from a process that has loaded torch already.

A service such as a parameter server is ``python -m MODULE CONFIG``. Loading torch takes it 2.5 s of
a processor, and a contract suite starts thousands. Here a worker's `subprocess.Popen` has such a
process forked from the worker's zygote, a fork of the worker from before it had threads. The
service becomes the worker's own child, as one that is started in the usual way, with the given
environment and pipes. Tests that start workers by themselves, as torchrun does, are not concerned.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SERVICES = ("wingbeat.methods.model_averaging", "wingbeat.methods.parameter_server")
_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER
_LARGEST = 1 << 17


def start(at_fork: Callable[[], None]) -> None:
    """Fork this process's zygote, and have services forked from it from now on (Linux only).

    Args:
        at_fork: called in the zygote first, to close what it must not keep open.
    """
    if sys.platform != "linux":
        return
    worker = os.getpid()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        at_fork()
        _serve(theirs, worker)
    theirs.close()

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, args: Any, *more: Any) -> None:
            if list(args[:2]) != [sys.executable, "-m"] or args[2] not in SERVICES:
                super()._execute_child(args, *more)  # type: ignore[misc]
                return
            env, (reads, _, _, writes) = more[5], more[9:13]
            request = json.dumps({"words": args[2:], "env": env}).encode()
            socket.send_fds(ours, [request], [reads, writes])
            self.pid = int(ours.recv(32))
            self._child_created = True
            os.close(reads)
            os.close(writes)

    subprocess.Popen = Popen  # type: ignore[misc]


def _serve(asked: socket.socket, worker: int) -> NoReturn:
    """Fork a service for each request, until the worker is gone."""
    while True:
        request, fds, _, _ = socket.recv_fds(asked, _LARGEST, 2)
        if not request:
            os._exit(0)
        said, says = os.pipe()
        between = os.fork()
        if between == 0:
            service = os.fork()
            if service == 0:
                asked.close()
                os.close(said)
                os.close(says)
                _become(json.loads(request), fds, worker)
            os.write(says, str(service).encode())
            os._exit(0)
        os.waitpid(between, 0)
        # The service is the worker's child only now: sooner, a poll would take it for ended.
        asked.send(os.read(said, 32))
        for fd in (said, says, *fds):
            os.close(fd)


def _become(request: dict[str, Any], fds: Sequence[int], worker: int) -> NoReturn:
    """Run as the service, and end as its process would."""
    code = 1
    try:
        while os.getppid() != worker:  # its parent is on its way out
            time.sleep(0.001)
        for fd, of in zip(fds, (0, 1), strict=True):
            os.dup2(fd, of)
            os.close(fd)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["env"])
        module, *words = request["words"]
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
