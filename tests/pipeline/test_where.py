"""Conditions that hostile or careless people give to a replay: each chooses rows, or is refused in one line."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.choosing import TIME, Choice, matching
from tests.pipeline.test_replay import history
from tests.support.command import Agent, Ended
from tests.support.publishing import Outbox

READS = "reads other tables or files"
CALLS = "calls Java"
CHANCE = "another one each time"
LITERAL = "write a literal time, such as TIMESTAMP'"
ALIKE = {
    *("array", "arrays_zip", "concat", "map", "map_concat", "named_struct", "struct", "when"),
    *("current_catalog", "current_database", "current_path", "current_schema", "current_timezone", "version"),
    *("current_user", "session_user", "user"),
    *("e", "pi", "make_dt_interval", "make_interval", "make_ym_interval"),
}
"""Functions of Spark's that take no argument, and give the same in the same session."""

REFUSED: dict[str, tuple[str, str]] = {
    "a second statement": ("1=1; DROP TABLE durable.outgoing_envelopes", "PARSE_SYNTAX_ERROR"),
    "a query": ("SELECT 1", "PARSE_SYNTAX_ERROR"),
    "an unterminated text": ("address = 'x", "PARSE_SYNTAX_ERROR"),
    "an unterminated name": ("`address = 1", "PARSE_SYNTAX_ERROR"),
    "an unterminated comment": ("true /* rest", "UNCLOSED_BRACKETED_COMMENT"),
    "an unknown column": ("colour = 1", "UNRESOLVED_COLUMN"),
    "an unknown function": ("getenv('HOME') = ''", "UNRESOLVED_ROUTINE"),
    "no condition": ("address", "FILTER_NOT_BOOLEAN"),
    "NULL": ("NULL", "FILTER_NOT_BOOLEAN"),
    "nothing": (" ", "the text is empty"),
    "everything": ("*", "INVALID_USAGE_OF_STAR"),
    "an aggregate": ("count(*) > 1", "INVALID_WHERE_CONDITION"),
    "a window": ("row_number() OVER (ORDER BY id) = 1", "WINDOW_FUNCTION_NOT_ALLOWED"),
    "several rows of one": ("explode(array(1, 2)) = 1", "UNSUPPORTED_GENERATOR"),
    "a parameter": (":x = 1", "UNBOUND_SQL_PARAMETER"),
    "a variable of the session": ("${spark.master} = 1", "is no condition over these columns"),
    "Python": ("__import__('os').system('true')", "PARSE_SYNTAX_ERROR"),
    "a field of a format": ("{settings.database_url}", "PARSE_SYNTAX_ERROR"),
    "markup of a terminal": ("[red]address[/red] = '[/]'", "PARSE_SYNTAX_ERROR"),
    "markup of a page": ("<script>alert(1)</script>", "PARSE_SYNTAX_ERROR"),
    "a file, if it exists": ("EXISTS (SELECT * FROM text.`/etc/passwd`)", READS),
    "a file, by its lines": ("message_type IN (SELECT value FROM text.`/etc/passwd`)", READS),
    "a file, by its size": ("(SELECT count(*) FROM text.`/etc/passwd`) > 0", READS),
    "Java": ("reflect('java.lang.System', 'setProperty', 'durable.hostile', '1') IS NULL", CALLS),
    "Java by another name": ("JAVA_METHOD('java.lang.System', 'getProperty', 'user.home') = 'x'", CALLS),
    "Java, tried": ("try_reflect('java.lang.System', 'getProperty', 'user.home') = 'x'", CALLS),
    "Java by a computed name": (
        "identifier('ref' || 'lect')('java.lang.System', 'setProperty', 'durable.hostile', '1') IS NULL",
        CALLS,
    ),
    "Java behind many others": (
        f"address IN ({', '.join(map(repr, map(str, range(100))))}, "
        "reflect('java.lang.System', 'setProperty', 'durable.hostile', '1'))",
        CALLS,
    ),
    "chance": ("rand() < 0.5", CHANCE),
    "chance of a seed": ("rand(3) < 0.5", CHANCE),
    "chance of another name": ("uniform(0, 1, 3) = 0", CHANCE),
    "a vector at random": ("hex(aes_encrypt(body, '0000111122223333')) < '8'", CHANCE),
    "the place of a row": ("monotonically_increasing_id() % 2 = 0", CHANCE),
    "the place of a row in its file": ("input_file_block_start() = 0", CHANCE),
    "the time": ("sent_at > now() - interval 1 hour", LITERAL),
    "the time without brackets": ("sent_at > current_timestamp", LITERAL),
    "the time in seconds": ("unix_timestamp() % 2 = 0", LITERAL),
    "the time as a word": ("sent_at < TIMESTAMP 'now'", LITERAL),
    "the time as a word that becomes one": ("sent_at < CAST('today' AS DATE)", LITERAL),
    "the time as a word that is read": ("sent_at < to_date('tomorrow')", LITERAL),
    **{
        f"the time as a word: {where}": (f"sent_at < {where}", LITERAL)
        for where in (
            "' Now '",
            "TRY_CAST('now' AS TIMESTAMP)",
            "CAST(concat('no', 'w') AS TIMESTAMP)",
            "try_to_timestamp('now')",
            "to_timestamp(lower('NOW'))",
            "date_add('today', 1)",
            "TIMESTAMP r'now'",
            "TIMESTAMP /* ' */ 'now'",
            r"TIMESTAMP 'n\u006fw'",
        )
    },
    "the day": ("CAST(sent_at AS DATE) = curdate()", LITERAL),
    "too many brackets": ("(" * 5_000 + "true" + ")" * 5_000, "nested too deeply"),
    "too many words": ("NOT " * 5_000 + "true", "nested too deeply"),
    "a long text": (f"colour = '{'x' * 100_000}'", "UNRESOLVED_COLUMN"),
    "a query beside a column of its name": ("exists = 1 AND EXISTS (SELECT * FROM text.`/etc/passwd`)", READS),
    "a list beside a column of its name": (
        "list = 2 AND message_type IN (SELECT value FROM text.`/etc/passwd`)",
        READS,
    ),
    "the time behind a text": ("message_type <> '\\' now(' AND sent_at > now()", LITERAL),
    "the time between texts": ("message_type <> '\\'' AND sent_at > now() AND address <> ''", LITERAL),
    "the time behind a comment": ("true /* ' */ AND sent_at > now() /* ' */", LITERAL),
    "the time behind a name": ("`list` = 2 AND `now()` = 3 AND sent_at > now()", LITERAL),
    "bytes that are no text": (os.fsdecode(b"address = '\xff'"), "is no text in UTF-8"),
}

FAILING: dict[str, tuple[str, str]] = {
    "a value that is no number": ("CAST(address AS INT) = 1", "CAST_INVALID_INPUT"),
    "an error of its own": ("id IS NULL OR raise_error('boom') IS NULL", "boom"),
}

CHOOSING: dict[str, tuple[str, int]] = {
    "always true": ("address = '' OR '1' = '1'", 10),
    "a comment": ("message_type = 'odd' -- and no more", 5),
    "over lines": ("message_type = 'odd'\nAND\ttrue", 5),
    "a name in backticks": ("`message_type` = 'odd'", 5),
    "a text that looks like a query": ("message_type <> 'EXISTS (SELECT reflect)'", 10),
    "a text in any alphabet": ("message_type <> '😀 ż ‮'", 10),
    "a function over a function": ("exists(array(message_type), each -> each = 'odd')", 5),
    "a long list": (f"message_type IN ({', '.join(repr(str(n)) for n in range(5_000))}, 'odd')", 5),
    "a field of the body": ("get_json_object(decode(body, 'utf-8'), '$.order_id') = '7'", 1),
    "a time": ("sent_at > TIMESTAMP'2020-01-01' AND unix_timestamp(sent_at) > 0", 10),
    "a day": ("sent_at > DATE'2020-01-01' AND sent_at > '2020-01-01' AND sent_at > to_date('2020-01-01')", 10),
    "texts that end like the name of a literal": (
        "get_json_object(decode(body, 'utf-8'), '$.date') IS NULL AND message_type NOT IN ('a timestamp', 'due DATE')",
        10,
    ),
    "the beginning of time": ("sent_at > 'epoch' AND sent_at > DATE 'epoch' AND sent_at > CAST('epoch' AS DATE)", 10),
    "a text that looks like a time": ("message_type <> 'now'", 10),
    "a text that looks like the clock": ("decode(body, 'utf-8') NOT LIKE '%now()%'", 10),
    "a text that looks like a function of Java": ('message_type <> "x reflect(1)"', 10),
    "a raw text that looks like chance": (r"message_type <> r'\rand('", 10),
    "a text that looks like a query in a plan": ("message_type <> 'it''s exists#1'", 10),
    "a text that looks like a literal of a time": ("""message_type <> "timestamp 'now'" """, 10),
    "a text that looks like a word that becomes a time": ("message_type <> 'cast(now as date)'", 10),
    "a column that looks like a query": ("exists = 1 AND `list` = 2", 10),
    "a column that looks like a function": ("`now()` = 3 AND `rand(` = 4", 10),
    "no row": ("message_type = 'x'", 0),
}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def messages(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("hostile") / "messages")
    odd = {name: F.lit(number) for number, name in enumerate(("exists", "list", "now()", "rand("), start=1)}
    history(spark).withColumns(odd).write.parquet(place)
    return place


def replayed(agent: Agent, url: str, messages: str, where: str, *arguments: str) -> Ended:
    options = ("--name", "x", "--parquet", messages, "--database", url, "--where", where)
    return agent("pipeline", "replay", *options, *arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_condition_beyond_one_row_is_refused_in_one_line(
    agent: Agent, spark: SparkSession, database_url: str, messages: str, name: str
) -> None:
    where, reason = REFUSED[name]
    ended = replayed(agent, database_url, messages, where)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err[:1_000]
    assert reason in ended.err
    assert len(ended.err) < 1_000
    assert Outbox(database_url).orders == []
    java: Any = spark._jvm
    assert java.java.lang.System.getProperty("durable.hostile") is None


@pytest.mark.parametrize("name", FAILING)
def test_condition_failing_for_a_row_is_reported_in_one_line(
    agent: Agent, database_url: str, messages: str, name: str
) -> None:
    where, reason = FAILING[name]
    ended = replayed(agent, database_url, messages, where)
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    assert reason in ended.err
    assert Outbox(database_url).orders == []


@pytest.mark.parametrize("name", CHOOSING)
def test_condition_over_one_row_chooses(agent: Agent, database_url: str, messages: str, name: str) -> None:
    where, count = CHOOSING[name]
    ended = replayed(agent, database_url, messages, where, "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert f"{several(count, 'messages')} would be replayed" in ended.out


def test_every_function_without_arguments_is_refused_or_known_to_be_alike(spark: SparkSession) -> None:
    """A function that a later version of Spark brings must be put into one of both."""
    rows, accepted = history(spark), set[str]()
    for (name,) in spark.sql("SHOW SYSTEM FUNCTIONS").collect():
        if name.replace("_", "").isalnum():
            with suppress(InvalidSetting):
                matching(rows.withColumn(TIME, F.col("sent_at")), Choice(where=f"{name}() IS NOT NULL"))
                accepted.add(name)
    assert accepted <= ALIKE, "another one each time?"
    assert "pi" in accepted
