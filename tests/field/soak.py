"""The random walk for as long as one asks: ``python -m tests.field.soak`` or ``make soak``.

A walk of a fixed length starts from each seed in turn; a failure prints its seed and ends with a
traceback and exit status 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.field.walk import Walk

OPERATIONS_OF_A_WALK = 2000
REPORT_EVERY_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Walk until the given number of seconds or operations is over; returns the exit status."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, help="run for this long (default 600)")
    parser.add_argument("--operations", type=int, help="run that many operations instead")
    parser.add_argument("--seed", type=int, help="first seed (default: drawn)")
    args = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    limit = args.operations or sys.maxsize
    seconds = args.seconds or (float("inf") if args.operations else 600.0)
    started = reported = time.monotonic()
    done = 0
    print(f"soak: first seed {seed}", flush=True)
    while done < limit and time.monotonic() - started < seconds:
        count = min(OPERATIONS_OF_A_WALK, limit - done)
        try:
            walk = Walk(seed)
            walk.run(count)
            walk.end()
        except BaseException:
            print(f"soak: FAILED, reproduce with --seed {seed} --operations {count}", flush=True)
            raise
        done, seed = done + count, seed + 1
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S:
            reported = now
            rate = done / (now - started)
            print(f"soak: {done} operations, {rate:.0f} per second, next seed {seed}", flush=True)
    print(f"soak: {done} operations in {time.monotonic() - started:.0f} s, no failure", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
