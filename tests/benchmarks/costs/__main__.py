"""Measures what each message costs, and fails when it has grown: `make bench-gate`.

Statements, commits, round trips and bytes of WAL are counted, so that the machine and its load do not matter. What has
grown is measured once more, and the lesser counts.

exit code 0    as the file says; costs that fell are shown, so that the file can be renewed
          1    a cost has grown
          2    bad use, or a work that is not in the file
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from durable.errors import InvalidSetting
from tests.benchmarks.costs import comparing
from tests.benchmarks.costs.comparing import Change, MessageCost
from tests.benchmarks.costs.measuring import COUNT, SINGLY, measure
from tests.benchmarks.rows import show_message_costs

KEPT: Final = Path(__file__).parent.parent / "costs.json"
FEWEST: Final = 100 * SINGLY


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.costs", description=__doc__)
    parser.add_argument("--renew", action="store_true", help="keep what is measured, in place of comparing it")
    parser.add_argument("--rabbitmq", action="store_true", help="measure RabbitMQ, too")
    parser.add_argument("--count", type=int, default=COUNT, help="messages of each work")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.count < FEWEST:
        parser.error(f"--count must be at least {FEWEST} (got {options.count})")
    try:
        before = [] if options.renew else comparing.read(KEPT)
        now = measure(options.count, with_rabbitmq=options.rabbitmq)
        found = [] if options.renew else comparing.changes(before, now)
        if any(change.has_grown for change in found):  # a slow machine has time for more of what agents do by the clock
            now = comparing.least(now, measure(options.count, with_rabbitmq=options.rabbitmq))
            found = comparing.changes(before, now)
    except InvalidSetting as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.renew:
        comparing.write(KEPT, now)
    _report(now, found, as_json=options.json)
    return int(any(change.has_grown for change in found))


def _report(now: Sequence[MessageCost], found: Sequence[Change], *, as_json: bool) -> None:
    if as_json:
        changed = [change._asdict() | {"has_grown": change.has_grown} for change in found]
        json.dump({"costs": [asdict(cost) for cost in now], "changes": changed}, sys.stdout, indent=2)
        return
    show_message_costs(now, "costs of a message")
    _show_changes([change for change in found if change.has_grown], "grown: make it cheaper, or say why it costs more")
    _show_changes([change for change in found if not change.has_grown], f"fallen: {comparing.RENEWAL}")


def _show_changes(found: Sequence[Change], title: str) -> None:
    table = Table(title=title)
    for column in ("work", "quantity", "before", "now", "change"):
        table.add_column(column, justify="left" if column in ("work", "quantity") else "right")
    for change in found:
        share = f"{change.now / change.before - 1:+.1%}" if change.before else ""
        table.add_row(change.work, change.quantity, f"{change.before:,.3f}", f"{change.now:,.3f}", share)
    if found:
        Console(width=150).print(table)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # the receiver's handler never ends
    sys.exit(main())
