"""Private copies of the tree, in which files are changed; the checkout itself is only read."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


class Tree:
    """A copy of the tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Put this text into a file while the block lasts.

        Its bytecode goes before and after: Python compares times in whole seconds.
        """
        path = self.folder / file
        original = path.read_text()
        self._write(path, text)
        try:
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


@contextmanager
def copied() -> Iterator[Tree]:
    """Copy all files that git knows, or would add, with the symlinks in durable/ as they are."""
    folder = Path(tempfile.mkdtemp(prefix="durable-mutants-"))
    try:
        for name in _files():
            source, target = ROOT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        yield Tree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and ((ROOT / name).exists() or (ROOT / name).is_symlink())]
