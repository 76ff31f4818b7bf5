"""Processor time of a worker and what it has started."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from wingbeat_lab.bench import worker

BURN = """
import time
while time.process_time() < 0.3:
    pass
print("burnt", flush=True)
input()
"""


def test_processor_time_is_that_of_all_threads() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    before = worker.own_cpu_s()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert worker.own_cpu_s() - before >= 0.049


def test_processor_time_includes_running_children() -> None:
    before = worker.children_cpu_s()
    command = [sys.executable, "-c", BURN]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "burnt\n"
        burnt = worker.children_cpu_s() - before
        child.communicate("\n", timeout=30)
    assert 0.25 <= burnt < 5
