"""The tests of docs/examples/testing pass as an application runs them, by pytest in a folder of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from tests.support.pages import EXAMPLES

OPTIONS = ["-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-W", "ignore"]


async def test_examples_of_tests_pass(tmp_path: Path) -> None:
    for path in (EXAMPLES / "testing").glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "PYTEST_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", *OPTIONS),
        cwd=tmp_path,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert "8 passed" in output.decode()
