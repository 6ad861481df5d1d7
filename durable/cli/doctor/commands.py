"""doctor: checks before the first message is sent, each finding with advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import typer

from durable.cli.doctor.application import application_checks
from durable.cli.doctor.checks import Check, Verdict, ok
from durable.cli.doctor.database import database_checks
from durable.cli.doctor.encryption import key_checks
from durable.cli.doctor.engines import engine_checks
from durable.cli.output import Block, emit
from durable.cli.target import Target, on_target


@on_target()
def doctor(target: Target) -> None:
    """Check settings, database and application; without APP:BUS only the database. Ends with 1 when a check fails."""
    bus, settings = target
    declared = bus.application.handlers.values() if bus is not None else ()
    checks = [
        ok("settings", f"{len(settings.model_fields_set)} set, all valid"),
        *database_checks(settings, has_sync_handlers=any(not handler.is_async for handler in declared)),
        *key_checks(target),
        *([*engine_checks(bus), *application_checks(bus)] if bus is not None else []),
    ]
    healthy = all(check.verdict is not Verdict.FAIL for check in checks)
    emit({"healthy": healthy, "checks": [asdict(check) for check in checks]}, *_lines(checks))
    if not healthy:
        raise typer.Exit(1)


def _lines(checks: Sequence[Check]) -> list[Block]:
    lines: list[Block] = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name}: {check.detail}")
        if check.advice:
            lines.append(f"      -> {check.advice}")
    return lines
