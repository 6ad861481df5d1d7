"""The Python of README.md and docs/*.md, block by block. Each is one of three, and a test holds it to that:

an excerpt     its text stands in a file of docs/examples, which a test runs; a first line `# name.py` may name the file
marked         a line before it says why it is not run: <!-- not run: it waits for the Enter key -->
run            as it stands, with the names of tests/integration/docs/given/PAGE.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md"))]

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NAME = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    page: Path
    line: int
    code: str
    reason: str | None

    @property
    def is_excerpt(self) -> bool:
        named = _NAME.match(self.code)
        code = self.code[named.end() :] if named else self.code
        return any(code.strip() in path.read_text() for path in sources() if not named or path.name == named[1])

    @property
    def is_run(self) -> bool:
        return self.reason is None and not self.is_excerpt

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def sources() -> list[Path]:
    return sorted(EXAMPLES.rglob("*.py"))


def blocks(page: Path) -> list[Block]:
    return list(_blocks(page, page.read_text()))


def _blocks(page: Path, text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(page, line, found["code"], found["reason"])
