"""Every command of the pipeline that needs Spark, one after the other in one session, on a database and a lake.

Run as a program with a database's URL, a lake, and the options that say where Spark runs; prints by command how it
ended and what it said, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from durable.cli import main

OLD_DAYS = 30


def commands(lake: str) -> dict[str, list[str]]:
    """With --json, where a command has it."""
    page = str(Path(lake).with_name("page.html"))
    again = ["--side", "incoming", "--type", "orders.order-placed", "--destination", "local"]
    return {
        "archive": ["archive", "--service", "shop"],
        "verify": ["verify", "--service", "shop"],
        "report": ["report", "--out", page, "--by", "address"],
        "audit": ["audit", "--sender", lake, "--receiver", lake],
        "conversations": ["conversations"],
        "dry run": ["replay", "--name", "x", *again, "--dry-run"],
        "replay": ["replay", "--name", "x", *again, "--chunk", "30"],
        "replay again": ["replay", "--name", "x", *again],
        "bad condition": ["replay", "--name", "bad", "--where", "colour = 1"],
        "hostile condition": ["replay", "--name", "hostile", "--where", "reflect('java.lang.System', 'gc') IS NULL"],
        "failing condition": ["replay", "--name", "failing", "--where", "raise_error('boom') IS NULL"],
        "purge": ["purge", "--service", "shop", "--keep", str(OLD_DAYS)],
    }


def run(arguments: list[str]) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            main(["pipeline", *arguments, "--json"])
        except SystemExit as ended:
            code = ended.code
    said = out.getvalue()
    return {"code": code, "said": json.loads(said) if said else None, "error": err.getvalue()}


if __name__ == "__main__":
    url, lake, *where = sys.argv[1:]
    os.environ |= {"DURABLE_DATABASE_URL": url, "DURABLE_LAKE": lake}
    print(json.dumps({name: run([*given, *where]) for name, given in commands(lake).items()}))
