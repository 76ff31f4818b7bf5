"""Simulates machines with the faults of seeds, or plays the scenario of a file again."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from simulation.play import Failed, machines, play, play_or_shrink
from simulation.scenario import Scenario


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make simulate", usage='make simulate ARGS="WHAT [options]"', description=__doc__,
        epilog='examples: ARGS="groups --seed 17 --log"; ARGS="groups --steps 1000000"; '
        'ARGS="/tmp/scenario.txt --log"',
    )  # fmt: skip
    parser.add_argument("what", help=f"a file with a scenario, or one of {', '.join(machines())}")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=1, help="go on with further seeds until then")
    parser.add_argument("--log", action="store_true", help="print each fault and error")
    parser.add_argument(
        "--keep", action="store_true", help="do not make a failing scenario smaller"
    )
    given = parser.parse_args()
    log = print if given.log else lambda _: None
    if given.what not in machines():
        allowed = f"name a file with a scenario, or one of {', '.join(machines())}"
        try:
            scenario = Scenario.parse(Path(given.what).read_text(encoding="utf-8"))
            machines()[scenario.machine]
        except OSError as error:
            parser.error(f"{given.what}: {error.strerror}: {allowed}")
        except (KeyError, ValueError) as error:
            parser.error(f"{given.what}: not a scenario ({error}): {allowed}")
        print(play(scenario, log), "steps")
        return 0
    done, seed, begun = 0, given.seed, time.perf_counter()
    while done < given.steps:
        scenario = machines()[given.what].draw(seed)
        if given.log:
            print(scenario)
        try:
            done += play(scenario, log) if given.log or given.keep else play_or_shrink(scenario)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        except BaseException:
            print(scenario, file=sys.stderr)
            raise
        seed += 1
    seconds = time.perf_counter() - begun
    print(f"{done} steps of {seed - given.seed} scenarios in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
