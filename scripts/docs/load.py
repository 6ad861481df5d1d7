"""The entry for mkdocs, which loads a hook as a file by itself, outside of any package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.docs.hooks import on_files, on_page_markdown

__all__ = ["on_files", "on_page_markdown"]
