"""Ends of transactions, and savepoints, in statements as text: SQLAlchemy tells of neither.

The text is read as Postgres reads it: comments within comments, names and texts in quotes, bodies in dollars (its
documentation, "Lexical Structure"), and functions whose body is SQL, which psql splits at no semicolon either. With
`standard_conforming_strings = off` it would read backslashes otherwise.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, Literal, NamedTuple

_MAY_CONTROL: Final = re.compile(r"commit|end|abort|rollback|prepare|savepoint|release", re.IGNORECASE)
_LETTER: Final = r"A-Za-z_\u0080-\U0010ffff"
_TOKEN: Final = re.compile(
    rf"""(?P<space>\s+ | --[^\n\r]*) | (?P<comment>/\*)
    | (?P<text>E'(?:[^'\\]|\\.|'')*'? | (?:U&|[BXN])?'(?:[^']|'')*'?)
    | (?P<name>(?:U&)?"(?:[^"]|"")*"?)
    | (?P<word>[{_LETTER}][{_LETTER}0-9$]*)
    | (?P<body>\$(?:[{_LETTER}][{_LETTER}0-9]*)?\$)
    | (?P<semicolon>;) | (?P<other>[^\s\-/'"$;{_LETTER}]+ | .)""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)
_IN_COMMENT: Final = re.compile(r"/\*|\*/")
_ESCAPED: Final = r"{0}(?:{0}|\+([0-9A-Fa-f]{{6}})|([0-9A-Fa-f]{{4}}))"
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_NAME_BYTES: Final = 63  # of a name; Postgres cuts off the rest
_MOST_TOKENS: Final = 8  # in a statement about a transaction
_LONGEST_KEPT: Final = 2_000  # characters; the answers for longer statements are not kept

Verb = Literal["savepoint", "rollback", "release"]


class Control(NamedTuple):
    """Effects of statements on their transaction."""

    ends: bool
    savepoints: tuple[tuple[Verb, str], ...]
    """Those of the statements, in order, each with what becomes of it."""
    is_alone: bool = True
    """Is it one statement? Of several some may have been carried out when one is refused."""


class _Token(NamedTuple):
    kind: str
    text: str


def ends_transaction(sql: str) -> bool:
    """Tell whether one of these statements ends its transaction.

    >>> [ends_transaction(sql) for sql in ("COMMIT", "ROLLBACK TO a", "SELECT 1; end", "SELECT ';COMMIT'")]
    [True, False, True, False]
    """
    return control_of(sql).ends


def control_of(sql: str) -> Control:
    """Return what these statements do to their transaction.

    >>> control_of("SAVEPOINT a; ROLLBACK TO SAVEPOINT B; RELEASE \\"C\\"; SELECT '; RELEASE d'").savepoints
    (('savepoint', 'a'), ('rollback', 'b'), ('release', 'C'))
    """
    return _kept(sql) if len(sql) <= _LONGEST_KEPT else _control_of(sql)


def _control_of(sql: str) -> Control:
    if _MAY_CONTROL.search(sql) is None:
        return Control(ends=False, savepoints=())
    # Its first words tell what one statement does, and a long one is not read to its end.
    statements = list(_statements(sql)) if ";" in sql else [list(islice(_tokens(sql), _MOST_TOKENS))]
    savepoints = tuple(found for each in statements if (found := _savepoint(each)) is not None)
    return Control(any(map(_ends, statements)), savepoints, len(statements) == 1)


_kept = lru_cache(maxsize=1_024)(_control_of)


def _ends(statement: Sequence[_Token]) -> bool:
    match _words(statement):
        case ["commit" | "rollback", "prepared", *_]:  # another transaction, and refused within one
            return False
        case ["rollback", "to", *_] | ["rollback", "work" | "transaction", "to", *_]:
            return False
        case ["commit" | "end" | "abort" | "rollback", *_] | ["prepare", "transaction", *_]:
            return True
        case _:
            return False


def _savepoint(statement: Sequence[_Token]) -> tuple[Verb, str] | None:
    verb: Verb
    words = _words(statement)
    match words:
        case ["savepoint", *_]:
            verb, at = "savepoint", 1
        case ["release", *_]:
            verb, at = "release", 1
        case ["rollback", "to", *_]:
            verb, at = "rollback", 2
        case ["rollback", "work" | "transaction", "to", *_]:
            verb, at = "rollback", 3
        case _:
            return None
    if verb != "savepoint" and words[at : at + 1] == ["savepoint"] and len(words) > at + 1:  # it may be a name, too
        at += 1
    if statement[at : at + 1] and statement[at].kind in ("word", "name"):
        return verb, _name(statement[at:])
    return None  # the database refuses it


def _words(statement: Sequence[_Token]) -> list[str]:
    """The first words; a name in quotes is none."""
    return [token.text if token.kind == "word" else "" for token in statement]


# ---------------------------------------------------------------- reading


def _statements(sql: str) -> Iterator[list[_Token]]:
    """Yield the first tokens of each statement, but for spaces and comments."""
    statement: list[_Token] = []
    depth = 0  # of blocks in a body of SQL
    for token in _tokens(sql):
        if token.kind == "semicolon" and not depth:
            if statement:
                yield statement
            statement = []
            continue
        if len(statement) < _MOST_TOKENS:
            statement.append(token)
        if token.kind == "word" and statement[0].text == "create" and _is_routine(statement):
            if token.text == "begin" or (depth and token.text == "case"):
                depth += 1
            elif depth and token.text == "end":
                depth -= 1
    if statement:
        yield statement


def _is_routine(statement: Sequence[_Token]) -> bool:
    return not {"function", "procedure"}.isdisjoint(_words(statement)[1:4])


def _tokens(sql: str) -> Iterator[_Token]:
    at = 0
    while at < len(sql):
        found = _TOKEN.match(sql, at)
        assert found is not None
        kind, text, at = found.lastgroup or "other", found.group(), found.end()
        if kind == "comment":
            at = _end_of_comment(sql, at)
        elif kind == "body":
            end = sql.find(text, at)
            at = len(sql) if end < 0 else end + len(text)
            yield _Token(kind, "")
        elif kind == "word":
            yield _Token(kind, text.translate(_LOWER))
        elif kind != "space":
            yield _Token(kind, text)


def _end_of_comment(sql: str, at: int) -> int:
    depth = 1
    for found in _IN_COMMENT.finditer(sql, at):
        depth += 1 if found.group() == "/*" else -1
        if not depth:
            return found.end()
    return len(sql)


def _name(rest: Sequence[_Token]) -> str:
    """The name that Postgres has for the first of these."""
    text = rest[0].text
    if rest[0].kind == "name":
        is_escaped = text[0] in "uU"
        text = text[text.index('"') + 1 :].removesuffix('"').replace('""', '"')
        if is_escaped:
            has_own = len(rest) > 2 and rest[1].text == "uescape" and len(rest[2].text) == len("'x'")
            text = _unescaped(text, rest[2].text[1] if has_own else "\\")
    return text.encode()[:_NAME_BYTES].decode(errors="ignore")


def _unescaped(text: str, sign: str) -> str:
    def letter(found: re.Match[str]) -> str:
        return chr(int(found[1] or found[2], 16)) if found[1] or found[2] else sign

    return re.sub(_ESCAPED.format(re.escape(sign)), letter, text)
