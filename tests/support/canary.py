"""A word that must be nowhere: in no column of any table, in no form that a body can take."""

from __future__ import annotations

import base64
import json

from tests.support.tables import Tables

CANARY = "canary-kx7q-0815"


def forms(word: str = CANARY) -> list[str]:
    """The word as text, as Postgres shows bytes, and in base64, wherever it begins in it."""
    shifted = [base64.b64encode(b"\0" * skip + word.encode()).decode()[4:-4] for skip in range(3)]
    return [word, word.encode().hex(), *shifted]


def found(tables: Tables, word: str = CANARY, schema: str = "durable") -> list[str]:
    """The tables of the schema with a row that shows the word in any form."""
    names = tables.rows(
        "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'p')", schema
    )
    pattern = "|".join(forms(word)).replace("+", "\\+")
    condition = f"CAST(row AS text) ~ '{pattern}'"
    return [
        name
        for name in sorted(names)
        if tables.one(f'SELECT EXISTS (SELECT FROM "{schema}"."{name}" AS row WHERE {condition})')
    ]


def in_text(text: str | bytes, word: str = CANARY) -> list[str]:
    """The forms of the word in a text."""
    whole = text.decode("latin-1") if isinstance(text, bytes) else text
    return [form for form in (*forms(word), json.dumps(word)) if form in whole]
