"""Condition over the columns of one row, in Spark's SQL: it reads nothing else, and is always the same for a row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from durable.errors import InvalidSetting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BEYOND_THE_ROW: Final = re.compile(
    r"\b(?P<query>exists|list|[a-z]+-subquery)#\d+"
    r"|\b(?P<java>(?:try_)?reflect|java_method)\("
    r"|\b(?P<chance>rand|randn|random|randstr|uniform|uuid|shuffle|aes_encrypt)\("
    r"|\b(?P<place>monotonically_increasing_id|spark_partition_id|input_file_(?:name|block_start|block_length))\("
    r"|\b(?P<clock>now|current_(?:timestamp|date|time)|localtimestamp)\("
    r"|\b(?:try_)?cast\(\s*(?P<word>now|today|tomorrow|yesterday)\b[^()]* as (?:date|timestamp)"
    r"|\b(?:try_)?to_(?:date|timestamp\w*)\(\s*(?P<read>now|today|tomorrow|yesterday)\b",
    re.IGNORECASE,
)
"""How a plan shows what is more than a condition over the columns of one row."""
_WORD: Final = re.compile(r"\b(?:date|timestamp\w*)(?:\s|--[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*'word'", re.IGNORECASE)
"""A literal of a time that is a word, such as 'now': a plan shows only the time at which it was read."""
_NUMBER: Final = re.compile(r"r?['\"]\s*(?:[\d+-]|epoch\s*['\"])", re.IGNORECASE)
"""How the text of a literal of a time begins that is always the same."""
_EPOCH: Final = re.compile(r"r?['\"]\s*epoch\s*['\"]", re.IGNORECASE)
_TOKEN: Final = re.compile(
    r"--[^\n]*|/\*.*?\*/|`(?:[^`]|``)*`"
    r"""|(?P<text>\br'[^']*'|\br"[^"]*"|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")""",
    re.IGNORECASE | re.DOTALL,
)
"""A comment, a name in backticks, or a text of Spark's SQL."""
_HARMLESS: Final = str.maketrans("(#", "__")
_OTHER: Final = "it is another one each time, so that the same replay would choose other messages"
_MEANT: Final = {
    "query": "it reads other tables or files",
    "java": "it calls Java",
    "chance": _OTHER,
    "place": _OTHER,
    **dict.fromkeys(
        ("clock", "read", "word"), f"{_OTHER}; write a literal time, such as TIMESTAMP'2030-05-01 00:00:00'"
    ),
}
_SHOWN_FIELDS: Final = "spark.sql.debug.maxToStringFields"
_MOST_SHOWN: Final = 100  # characters of what somebody wrote


def check_condition(rows: DataFrame, where: str) -> None:
    """Raise InvalidSetting unless `where` is a condition over the columns of one row, and always the same for it.

    Spark's SQL would also read any file of the machine, and call any static method of Java.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    empty = rows.sparkSession.createDataFrame([], rows.schema)
    alike = _without_lookalikes(where)
    try:
        narrowed = empty.where(where)
        planned = _without_columns(_plan(empty.where(alike)), rows.columns)
        is_same, reads_clock = _is_deterministic(narrowed), _reads_clock(empty.where(_without_epochs(where)))
    except (PySparkException, Py4JError) as error:
        said = " ".join(str(error).partition("SQLSTATE")[0].split())
        raise InvalidSetting(
            f"option where: {_shortened(where)} is no condition over these columns: {_cause(said)}"
        ) from error
    beyond = _BEYOND_THE_ROW.search(planned)
    is_word = reads_clock or _WORD.search(_TOKEN.sub(_as_number_or_word, where))
    found = beyond.lastgroup if beyond else "word" if is_word else None if is_same else "chance"
    if found is not None:
        raise InvalidSetting(f"option where: {_shortened(where)} is no condition over these columns: {_MEANT[found]}")


def _without_lookalikes(where: str) -> str:
    """Return the condition with other texts in place of those that look like more than a condition.

    What is taken for a text and is none loses one bracket of two, and is no condition any more.
    """

    def altered(found: re.Match[str]) -> str:
        if found["text"] is None:
            return found[0]
        return _BEYOND_THE_ROW.sub(lambda alike: alike[0].translate(_HARMLESS), found[0])

    return _TOKEN.sub(altered, where)


def _as_number_or_word(found: re.Match[str]) -> str:
    if found["text"] is None:
        return found[0]
    return "'0'" if _NUMBER.match(found[0]) else "'word'"


def _without_epochs(where: str) -> str:
    """Return the condition with another time in place of 'epoch', the one word for a time that is always the same."""
    return _TOKEN.sub(lambda found: "'1970-01-01'" if _EPOCH.fullmatch(found[0]) else found[0], where)


def _without_columns(plan: str, columns: Sequence[str]) -> str:
    """Return the plan as it is analysed, without its columns, whose names may be those of what is refused."""
    listed = ", ".join(rf"{re.escape(name)}#(\d+)L?" for name in columns)
    analysed = plan.partition("== Analyzed Logical Plan ==\n")[2].partition("\n")[2] or plan
    found = re.search(rf"\[{listed}\]", analysed)
    if found is None:
        return analysed
    ours = (rf"{re.escape(name)}#{number}L?(?!\d)" for name, number in zip(columns, found.groups(), strict=True))
    return re.sub("|".join(ours), "column", analysed)


def _is_deterministic(narrowed: DataFrame) -> bool:
    """Ask Spark whether a condition is the same for the same row; where its JVM is out of reach, the names tell alone.

    The current time is the same for Spark, throughout one query.
    """
    frame: Any = getattr(narrowed, "_jdf", None)
    return frame is None or bool(frame.queryExecution().analyzed().condition().deterministic())


def _reads_clock(narrowed: DataFrame) -> bool:
    """Ask Spark whether it reads a text as a word for a time, such as 'now', however the text is computed and read;
    where its JVM is out of reach, the names tell alone.
    """
    frame: Any = getattr(narrowed, "_jdf", None)
    if frame is None:
        return False
    jvm: Any = narrowed.sparkSession._jvm
    rules = jvm.org.apache.spark.sql.catalyst.optimizer
    plan = rules.ReplaceExpressions.apply(frame.queryExecution().analyzed())
    return not rules.SpecialDatetimeValues.apply(plan).fastEquals(plan)


def _plan(rows: DataFrame) -> str:
    """Explain the rows by Spark's plan, with all of its expressions."""
    conf = rows.sparkSession.conf
    before = conf.get(_SHOWN_FIELDS)
    conf.set(_SHOWN_FIELDS, str(1 << 30))
    try:
        with redirect_stdout(StringIO()) as explained:
            rows.explain("extended")
    finally:
        conf.set(_SHOWN_FIELDS, str(before))
    return explained.getvalue()


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def _cause(said: str) -> str:
    if "StackOverflowError" in said:
        return "it is nested too deeply"
    return said if len(said) <= 4 * _MOST_SHOWN else f"{said[: 4 * _MOST_SHOWN]}..."
