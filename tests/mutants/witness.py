"""A plugin of pytest that writes what became of each test, for the process that judges a mutant.

Without the file that it writes at the end, the run has told nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

FILE: Final = "MUTANTS_WITNESS"

_told: list[dict[str, Any]] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    report.error_type = None if call.excinfo is None else call.excinfo.typename


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    said = getattr(crash, "message", None) or (str(report.longrepr) if report.longrepr else "")
    _told.append(
        {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "error": getattr(report, "error_type", None),
            "said": said.strip().partition("\n")[0][:300],
        }
    )


def pytest_sessionfinish(exitstatus: int) -> None:
    Path(os.environ[FILE]).write_text(json.dumps({"exit": int(exitstatus), "reports": _told}))
