"""A mutant: one change in one file, and the tests that should notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SIMULATION: Final = "simulation"
"""Stands in `killed_by` for the seeds of tests.simulation."""


class Unusable(Exception):
    """The table does not fit the code any more."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of `before`, which stands once in the file, to `after`."""

    room: str
    name: str
    file: str
    before: str
    after: str
    killed_by: tuple[str, ...]
    """The tests that fail then, as pytest names them, or SIMULATION."""
    hangs: bool = False
    """Is a test that ends by its timeout a kill?"""

    def applied(self, text: str) -> str:
        """Return the text of the file with the change. Raises Unusable when it has another number of places."""
        if (count := text.count(self.before)) != 1:
            raise Unusable(f"{self.name}: {self.file} has its text {count} times; change the row of the table")
        if self.before == self.after:
            raise Unusable(f"{self.name}: its change changes nothing")
        return text.replace(self.before, self.after)

    def place(self, tree: Path) -> tuple[Path, int]:
        """Return the file in this tree, and the first line of the change."""
        path = tree / self.file
        text = path.read_text()
        self.applied(text)
        return path, text[: text.index(self.before)].count("\n") + 1
