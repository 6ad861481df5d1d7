"""`python -m tests.chaos --profile pr --transport tcp --seed 7`: one run, its report, and an exit code of 1 for a
violation. Reports are in build/chaos.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.chaos.plan import TRANSPORTS
from tests.chaos.profiles import PROFILES
from tests.chaos.report import write
from tests.chaos.run import run
from tests.support.root import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Two services under faults.")
    parser.add_argument("--profile", choices=PROFILES, default="pr")
    parser.add_argument("--transport", choices=TRANSPORTS, default="tcp")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "chaos")
    parser.add_argument("--minutes", type=float, help="time of faults, instead of the profile's")
    options = parser.parse_args()
    profile = PROFILES[options.profile]
    if options.minutes is not None:
        profile = replace(profile, faults_seconds=60 * options.minutes)
    name = f"{options.profile}-{options.transport}-{options.seed}"
    print(f"chaos: profile {options.profile}, transport {options.transport}, seed {options.seed}", flush=True)
    folder = options.folder / f"{name}-{int(time.time())}"

    # The proxies write to sockets that faults have closed.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    def tell(text: str) -> None:
        print(text, flush=True)

    outcome = asyncio.run(run(options.seed, profile, options.transport, folder, tell))
    return 0 if write(outcome, options.folder / name).is_right else 1


if __name__ == "__main__":
    sys.exit(main())
