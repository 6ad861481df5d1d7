"""`python -m tests.soak --hours 2`: a long run, its report in build/soak, and an exit code of 1 when something grew."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.soak.page import page
from tests.soak.run import Outcome, run
from tests.support.root import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Constant load, and a fault a minute.")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--pace", type=float, default=3.0, help="transactions a second of each of two nodes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "soak")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the proxies write to sockets that faults have closed
    print(f"soak: {options.hours:g} h, seed {options.seed}", flush=True)
    folder = options.folder / f"{options.seed}-{int(time.time())}"

    def tell(text: str) -> None:
        print(text, flush=True)

    outcome = asyncio.run(run(options.seed, options.hours, options.pace, folder, tell))
    report = options.folder / f"soak-{options.seed}"
    report.with_suffix(".json").write_text(json.dumps(asdict(outcome) | {"growing": outcome.growing}) + "\n")
    report.with_suffix(".html").write_text(page(outcome))
    show(outcome, Console())
    print(f"report: {report}.html and .json; logs of the nodes: {folder}")
    return 0 if outcome.is_right else 1


def show(outcome: Outcome, console: Console) -> None:
    table = Table("gauge", "readings", "middle third", "last third", "", box=None, header_style="bold")
    for gauge in outcome.gauges:
        middle, last = gauge.thirds()
        verdict = "grows" if gauge.grows() else "flat"
        table.add_row(gauge.name, str(len(gauge.readings)), gauge.shown(middle), gauge.shown(last), verdict)
    console.print(table)
    console.print(
        f"{outcome.sent:,} messages, {outcome.lost:,} lost, {outcome.twice:,} twice; {len(outcome.faults)} faults;"
        f" days: {', '.join(outcome.days)}"
    )
    for text in outcome.complaints:
        console.print(text, style="red", markup=False)
    verdict = "nothing grows, and nothing was lost" if outcome.is_right else "PROMISES WERE BROKEN"
    console.print(verdict, style="green" if outcome.is_right else "bold red")


if __name__ == "__main__":
    sys.exit(main())
