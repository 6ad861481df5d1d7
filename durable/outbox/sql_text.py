"""Ends of transactions, and savepoints, in statements as text: SQLAlchemy tells of neither.

The text is read as Postgres reads it (its documentation, "Lexical Structure"): comments within comments, names and
texts in quotes, texts that go on in the next line, bodies in dollars, and functions whose body is SQL. With
`standard_conforming_strings = off` it would read backslashes otherwise.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, Literal, NamedTuple

_PASSING: Final = frozenset((
    "select", "show", "insert", "update", "delete", "merge", "with", "values", "table", "copy", "savepoint", "release",
    "rollback", "commit", "end", "abort",
))  # fmt: skip
"""First words of statements about rows and savepoints. Of any other nobody knows what it leaves: a block may do all."""
_LASTING: Final = ("set_config", "pg_settings", "pg_notify", "advisory_", "lo_open", "pg_temp", 'u&"')
"""What lasts of statements about rows, in any place of them; a column of such a name costs speed alone. A name in
escapes may be any."""
_INTO_LASTING: Final = re.compile(r"into\s*(?:--|/\*|(?:local|global|temp|temporary)\b)")
_LETTER: Final = r"A-Za-z_\u0080-\U0010ffff"
_SPACE: Final = r"\ \t\n\r\f\v"  # no others: for Postgres the spaces of Unicode are letters
_NEXT_LINE: Final = r"(?:[\ \t\f\v]|--[^\n\r]*+)*+[\n\r](?:[\ \t\n\r\f\v]|--[^\n\r]*+[\n\r])*+"  # may be within a text
_IN_ESCAPES: Final = r"(?:[^'\\]|\\.|'')*+"
_TOKEN: Final = re.compile(
    rf"""(?P<space>[{_SPACE}]+ | --[^\n\r]*) | (?P<comment>/\*)
    | (?P<text>[Ee]'{_IN_ESCAPES}(?:'{_NEXT_LINE}'{_IN_ESCAPES})*+'? | (?:[Uu]&|[BbXxNn])?'(?:[^']|'')*'?)
    | (?P<name>(?:[Uu]&)?"(?:[^"]|"")*"?)
    | (?P<word>[{_LETTER}][{_LETTER}0-9$]*)
    | (?P<body>\$(?:[{_LETTER}][{_LETTER}0-9]*)?\$)
    | (?P<semicolon>;) | (?P<bracket>[()]) | (?P<other>[^{_SPACE}\-/'"$;(){_LETTER}]+ | .)""",
    re.DOTALL | re.VERBOSE,  # with IGNORECASE these many letters take twice as long to compile, in every process
)
_IN_COMMENT: Final = re.compile(r"/\*|\*/")
_ESCAPED: Final = r"{0}(?:{0}|\+([0-9A-Fa-f]{{6}})|([0-9A-Fa-f]{{4}}))"
_PLAIN_SIGN: Final = re.compile(r"'[^']'")
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_NAME_BYTES: Final = 63  # of a name; Postgres cuts off the rest
_MOST_TOKENS: Final = 8  # in a statement about a transaction
_LONGEST_KEPT: Final = 2_000  # characters; of longer statements only the last answer is kept

Verb = Literal["savepoint", "rollback", "release"]
About = tuple[Verb, str | None]
"""What becomes of a savepoint, and its name, unless only the database knows it."""


class Control(NamedTuple):
    """Effects of statements on their transaction."""

    ends: bool
    savepoints: tuple[About, ...]
    """Those of the statements, in order."""
    lasts: bool = False
    """May something last until the transaction ends: a setting, a temporary table, a cursor, a lock asked for, a
    notification, of which equal ones are one? What functions and triggers do is not in the text."""
    is_alone: bool = True
    """Is it one statement? Of several some may have been carried out when one is refused."""


class _Token(NamedTuple):
    kind: str
    text: str


def control_of(sql: str) -> Control:
    """Return what these statements do to their transaction.

    >>> control_of("SAVEPOINT a; ROLLBACK TO SAVEPOINT B; RELEASE \\"C\\"; SELECT '; RELEASE d'").savepoints
    (('savepoint', 'a'), ('rollback', 'b'), ('release', 'C'))
    >>> [control_of(sql).ends for sql in ("COMMIT", "ROLLBACK TO a", "SELECT 1; end", "SELECT ';COMMIT'")]
    [True, False, True, False]
    >>> [control_of(sql).lasts for sql in ("DO 'x'", "SELECT set_config('a', '1', true)", "UPDATE t SET a=1")]
    [True, True, False]
    """
    return _kept(sql) if len(sql) <= _LONGEST_KEPT else _last(sql)


def _control_of(sql: str) -> Control:
    # First words tell what one statement does; what lasts is searched for in the whole text.
    statements = list(_statements(sql)) if ";" in sql else [list(islice(_tokens(sql), _MOST_TOKENS))]
    savepoints = tuple(found for each in statements if (found := _savepoint(each)) is not None)
    lasts = any(map(_lasts, statements)) or _has_lasting(sql.lower(), may_make_a_table=not _inserts(statements))
    return Control(any(map(_ends, statements)), savepoints, lasts, len(statements) == 1)


_kept = lru_cache(maxsize=1_024)(_control_of)
_last = lru_cache(maxsize=1)(_control_of)
"""Each text is asked about several times, by the outbox and the fence, before it is sent and after it."""


def _ends(statement: Sequence[_Token]) -> bool:
    match _words(statement):
        case ["commit" | "rollback", "prepared", *_]:  # another transaction, and refused within one
            return False
        case ["rollback", "to", *_] | ["rollback", "work" | "transaction", "to", *_]:
            return False
        case ["prepare", "transaction", *_]:  # it may be the name of a statement
            return [token.text for token in statement[2:3]] not in (["as"], ["("])
        case ["commit" | "end" | "abort" | "rollback", *_]:
            return True
        case _:
            return False


def _lasts(statement: Sequence[_Token]) -> bool:
    first = next((token.text for token in statement if token.text != "("), "")
    return bool(statement) and first not in _PASSING


def _inserts(statements: Sequence[Sequence[_Token]]) -> bool:
    """Tell whether INTO names a table that is there."""
    return len(statements) == 1 and [token.text for token in statements[0][:1]] in (["insert"], ["merge"])


def _has_lasting(sql: str, *, may_make_a_table: bool) -> bool:
    is_made = may_make_a_table and _INTO_LASTING.search(sql) is not None
    return is_made or any(each in sql for each in _LASTING)


def _savepoint(statement: Sequence[_Token]) -> About | None:
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
    before, brackets, in_body = "", 0, False
    for token in _tokens(sql):
        if token.kind == "semicolon" and not in_body:
            if statement:
                yield statement
            statement, brackets = [], 0
        elif len(statement) < _MOST_TOKENS:
            statement.append(token)
        if token.kind == "bracket":
            brackets += 1 if token.text == "(" else -1
        elif token.kind == "word" and _is_routine(statement):
            if in_body:
                in_body = not (token.text == "end" and before in ("atomic", ";"))
            else:
                in_body = not brackets and (before, token.text) == ("begin", "atomic")
        before = token.text
    if statement:
        yield statement


def _is_routine(statement: Sequence[_Token]) -> bool:
    """Tell whether its body may be SQL, from BEGIN ATOMIC to an END in the place of a statement."""
    match _words(statement):
        case ["create", "function" | "procedure", *_] | ["create", "or", "replace", "function" | "procedure", *_]:
            return True
        case _:
            return False


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


def _name(rest: Sequence[_Token]) -> str | None:
    """The name that Postgres has for the first of these. None: it depends on the driver, or on another text."""
    text = rest[0].text
    if "%" in text:  # some drivers take two of them for one
        return None
    if rest[0].kind == "name":
        is_escaped = text[0] in "uU"
        text = text[text.index('"') + 1 :].removesuffix('"').replace('""', '"')
        if is_escaped:
            sign = "\\"
            if rest[1:2] == [_Token("word", "uescape")]:
                if len(rest) < 3 or not _PLAIN_SIGN.fullmatch(rest[2].text):
                    return None
                sign = rest[2].text[1]
            try:
                text = _unescaped(text, sign)
            except ValueError:
                return None
    return text.encode()[:_NAME_BYTES].decode(errors="ignore")


def _unescaped(text: str, sign: str) -> str:
    """Raise ValueError where an escape is no letter. Two may be the halves of one."""

    def letter(found: re.Match[str]) -> str:
        return chr(int(found[1] or found[2], 16)) if found[1] or found[2] else sign

    halves = re.sub(_ESCAPED.format(re.escape(sign)), letter, text)
    return halves.encode("utf-16", "surrogatepass").decode("utf-16")
