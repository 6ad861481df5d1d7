"""Fuzz every target in turn: `make fuzz MINUTES=n`, or one failing input again.

python -m tests.fuzz hunt MINUTES [TARGET ...]
python -m tests.fuzz again FILE
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import fresh_databases
from tests.fuzz.catalogue import TARGETS
from tests.fuzz.hunt import Hunt, command_for, hunt_for, run_again, target_of
from tests.fuzz.targets import Target
from tests.support.servers import EMBEDDED, shared_postgres

FOLDER = Path(".fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the targets, or run one again.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    hunting = commands.add_parser("hunt", help="fuzz the targets in turn, with fresh seeds and the corpus")
    hunting.add_argument("minutes", type=float, help="for all targets together")
    hunting.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    hunting.set_defaults(run=lambda given: _hunt(given.minutes, _named(parser, given.targets)))
    again = commands.add_parser("again", help="run one failing input again")
    again.add_argument("file", type=Path, help=f"written into {FOLDER}/failures")
    again.set_defaults(run=lambda given: _again(given.file))
    given = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # the checks read the log; nobody else does
    return int(given.run(given))


def _named(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[Target]:
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names or TARGETS]


def _hunt(minutes: float, targets: Sequence[Target]) -> int:
    failures = 0
    print(f"{'target':20} {'executions':>10} {'outcomes':>8} {'crashes':>7}")
    with shared_postgres(EMBEDDED) as server, fresh_databases(server) as make_database:
        for target in targets:
            with target.open(make_database) as check:
                hunt = Hunt(target, check)
                hunt_for(minutes * 60 / len(targets), hunt, FOLDER)
            print(f"{target.name:20} {hunt.executions:10} {len(hunt.words):8} {len(hunt.failures):7}", flush=True)
            for file in hunt.failures:
                print(f"    {file}; run it again: {command_for(file)}", flush=True)
            failures += len(hunt.failures)
    return 1 if failures else 0


def _again(file: Path) -> int:
    target = TARGETS[target_of(file)]
    with (
        shared_postgres(EMBEDDED) as server,
        fresh_databases(server) as make_database,
        target.open(make_database) as check,
    ):
        passes = run_again(file, target, check)
    print(f"{file}: {'passes now' if passes else 'was run again'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
