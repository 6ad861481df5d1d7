"""A command whose output is closed, full, or without a reader: its work is done, and no traceback printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A command that says something, works, and says more: as much as no buffer holds where that is asked for.
WORKING = """
import sys
from durable.cli import main, app
from durable.cli.output import print_blocks
from pathlib import Path

def command_line(*names):
    class Command:
        def main(self, **_):
            print("begins", flush=True)
            print("a warning", file=sys.stderr)
            Path("done").touch()
            print_blocks(["done" * {size}])
            if {code} == 2:
                raise ValueError("odd")
            return {code}
    return Command()

app.command_line = command_line
main([])
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
}
FULL = "output: cannot be written: No space left on device; the command has"
SIZES = [1, 100_000]
ENDS = {
    ">&-": (0, ""),
    "2>&-": (0, ""),
    ">&- 2>&-": (0, ""),
    "<&- >&- 2>&-": (0, ""),
    "2>/dev/full": (0, ""),
    ">/dev/full": (1, f"error: {FULL} done its work\n"),
    ">/dev/full 2>&1": (1, ""),
    ">/dev/full 2>&-": (1, ""),
}


def ended(tmp_path: Path, redirected: str, *, code: int = 0, size: int = 1) -> tuple[int, str]:
    script = tmp_path / "command.py"
    script.write_text(WORKING.format(code=code, size=size))
    done = subprocess.run(
        ["bash", "-c", f'"$0" command.py {redirected}', sys.executable],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.replace("a warning\n", "")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("redirected", ENDS)
def test_command_does_its_work_without_output(tmp_path: Path, redirected: str, size: int) -> None:
    assert ended(tmp_path, redirected, size=size) == ENDS[redirected]
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("redirected", [">&-", "2>&-", "2>/dev/full"])
def test_command_ends_with_its_own_code_when_output_is_closed(tmp_path: Path, redirected: str) -> None:
    assert ended(tmp_path, redirected, code=3) == (3, "")


def test_full_output_is_told_after_the_fault_of_the_command(tmp_path: Path) -> None:
    code, told = ended(tmp_path, ">/dev/full", code=2)
    assert (code, told.splitlines()) == (
        1,
        ["error: ValueError: odd; --debug shows the traceback", f"error: {FULL} ended with 1 all the same"],
    )


@pytest.mark.parametrize("size", SIZES)
def test_command_ends_quietly_when_its_reader_has_ended(tmp_path: Path, size: int) -> None:
    """Whether a few characters find a reader depends on who is first."""
    code, told = ended(tmp_path, "| true; exit ${PIPESTATUS[0]}", size=size)
    assert (code in (0, 141), told) == (True, "")


UNREAD = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from durable.cli import main
main({arguments!r})
"""


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["send", "--help"], ["pipeline"], ["keys", "list", "--help"]], ids=str
)
def test_command_ends_quietly_without_a_reader(tmp_path: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNREAD.format(arguments=arguments)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (141, "")


SAYING = """
import sys
from durable.cli import main, app
from durable.cli.output import emit, print_as_json

def command_line(*names):
    class Command:
        def main(self, **_):
            print_as_json({as_json})
            emit({{"place": {text!r}}}, {text!r})
    return Command()

app.command_line = command_line
main([])
"""
FEW_CHARACTERS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "strict": {"PYTHONIOENCODING": "utf-8:strict"},
    "a plain locale": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize(
    "text",
    ["plain", "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{CHECK MARK} \N{GRINNING FACE}"],
    ids=["plain", "odd"],
)
@pytest.mark.parametrize("locale", FEW_CHARACTERS)
def test_characters_without_an_encoding_are_escaped(tmp_path: Path, locale: str, text: str) -> None:
    def said(as_json: bool) -> bytes:
        (tmp_path / "command.py").write_text(SAYING.format(as_json=as_json, text=text), encoding="utf-8")
        environment = ENVIRONMENT | FEW_CHARACTERS[locale]
        done = subprocess.run(
            [sys.executable, "command.py"], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=True
        )
        assert done.stderr == b""
        return done.stdout

    encoding = "latin-1" if locale == "latin-1" else "utf-8" if locale == "strict" else "ascii"
    assert said(as_json=False).decode(encoding) == f"{text.encode(encoding, 'backslashreplace').decode(encoding)}\n"
    assert json.loads(said(as_json=True).decode(encoding)) == {"place": text}


def test_next_file_takes_no_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Or what a process that the command starts prints would be written into it."""
    script = "import os, sys; from durable.cli.streams import open_closed; open_closed(); f = open('file', 'w')"
    code = f"{script}; sys.exit(f.fileno() < 3 or not all(map(os.get_inheritable, range(3))))"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code],
        cwd=tmp_path,
        timeout=60,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0
