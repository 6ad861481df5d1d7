"""Progress of long parts, on stderr, so that it stands in no output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from tests.benchmarks.filling import Advance


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show a bar for the time of this block."""
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=total)
        yield lambda count: bars.advance(bar, count)
