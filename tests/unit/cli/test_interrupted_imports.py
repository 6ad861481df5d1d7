"""Ctrl-C while the command line loads: it ends with 130, and without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Interrupts as soon as this module is looked for; the first one is the first that the command line loads.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from durable.cli import main
main({arguments!r})
"""
MODULES = ["durable.cli.app", "typer", "sqlalchemy", "pydantic", "durable.version"]
COMMANDS = [["--help"], ["status"], ["run", "app:bus"], ["pipeline", "export"], ["pipeline", "erase"]]
OF_A_COMMAND = [("durable.cli.pipeline.commands", ["--help"]), ("durable.cli.inspect", ["status"])]
EVERY = [*((module, arguments) for module in MODULES for arguments in COMMANDS), *OF_A_COMMAND]


@pytest.mark.parametrize(("module", "arguments"), EVERY, ids=str)
def test_interrupt_during_an_import_ends_the_command(module: str, arguments: list[str]) -> None:
    code = INTERRUPTED.format(module=module, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["durable.cli.app", "typer", "durable.cli.inspect"])
def test_interrupted_command_prints_its_document(module: str) -> None:
    code = INTERRUPTED.format(module=module, arguments=["status", "--json"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (130, {"error": "interrupted", "exit_code": 130})
