"""What mkdocs does besides its own: the pages that are made from the code, and links that leave docs/.

The front page is README.md, whose links are absolute for PyPI: here they lead to the pages of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from scripts.docs import commands_page, settings_page

ROOT = Path(__file__).parents[2]
PROJECT = "https://github.com/durable-bus/durable"
_DOCS = re.compile(rf"{re.escape(PROJECT)}/(?:blob|raw)/main/docs/")
_OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:durable|recovery|tests|transports)/[^)]+)\)")


_MADE = {"reference/settings.md": settings_page.render, "reference/commands.md": commands_page.render}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    front = _DOCS.sub("", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=front))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to the code lead to the project: it is no part of the site."""
    made = _MADE.get(page.file.src_uri)
    return made() if made is not None else _OUTSIDE.sub(rf"]({PROJECT}/blob/main/\1)", markdown)
