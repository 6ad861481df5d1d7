"""The SQL statements of erasing: content goes, the row that accounts for its message stays.

`ids` or `keys` choose the messages. Rows that an earlier erasure has emptied are left to its record.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement

_CHOSEN: Final = """(id = ANY (CAST(:ids AS uuid[])) OR partition_key = ANY (CAST(:keys AS text[])))"""
_ERASABLE: Final = f"{_CHOSEN} AND erasure_id IS NULL"


def _names(text: str) -> str:
    """A text that holds one of the keys, by the patterns of `named`."""
    return f"COALESCE(normalize({text}, NFKC) ~* ANY (CAST(:named AS text[])), false)"


_ACTION: Final = {name: _names(f"CAST({name} AS text)") for name in ("target", "reason", "before", "after")}
# The reason of a letter's resolution is also that of the action which resolved it.
_COPIED: Final = f"""(actor, reason) IN (
    SELECT resolved_by, resolution_reason FROM {{schema}}.dead_letters
    WHERE {_ERASABLE} AND resolution_reason IS NOT NULL)"""
_ERASABLE_ACTION: Final = f"({' OR '.join([*_ACTION.values(), _COPIED])})"
# Ids stay, times, in whose digits a short key would be found, and words of ours. So does the destination: an address
# that history keeps, and that an archive may have yet to note.
_ERASABLE_PART: Final = f"""part.key NOT IN (
        'from', 'side', 'id', 'since', 'until', 'same-ids', 'destination', 'end', 'only'
    ) AND part.value <> CAST(:erased_part AS jsonb) AND {_names("part.value #>> '{}'")}"""
_ERASABLE_REPLAY: Final = f"EXISTS (SELECT FROM jsonb_each(plan) AS part WHERE {_ERASABLE_PART})"
_ERASABLE_CIRCUIT: Final = "kind = 'key' AND key = ANY (CAST(:keys AS text[])) AND reason <> 'erased'"

COUNT_CHOSEN = Statement(f"""
SELECT (SELECT count(*) FROM {{schema}}.envelope_history WHERE {_ERASABLE}) AS history,
    (SELECT count(*) FROM {{schema}}.dead_letters WHERE {_ERASABLE}) AS letters,
    (SELECT count(*) FROM {{schema}}.dead_letters WHERE {_ERASABLE} AND resolved_at IS NULL) AS open_letters,
    (SELECT count(*) FROM {{schema}}.outgoing_envelopes WHERE {_CHOSEN})
        + (SELECT count(*) FROM {{schema}}.incoming_envelopes WHERE {_CHOSEN}) AS waiting,
    (SELECT count(*) FROM {{schema}}.actions WHERE {_ERASABLE_ACTION})
        + (SELECT count(*) FROM {{schema}}.replays WHERE {_ERASABLE_REPLAY})
        + (SELECT count(*) FROM {{schema}}.circuits WHERE {_ERASABLE_CIRCUIT}) AS records
""")
# `xid` stays: the row is archived, or not, as it was before.
ERASE_HISTORY = Statement(f"""
WITH erased AS (
    UPDATE {{schema}}.envelope_history
    SET partition_key = NULL, error = NULL, headers = NULL, body = NULL, erasure_id = :erasure
    WHERE {_ERASABLE} RETURNING id
), attempts AS (
    UPDATE {{schema}}.failed_attempts SET reason = 'erased', traceback = ''
    WHERE letter_id IS NULL AND (id IN (SELECT id FROM erased) OR id = ANY (CAST(:ids AS uuid[])))
), answered AS (
    UPDATE {{schema}}.answers SET headers = NULL, body = NULL
    WHERE request_id IN (SELECT id FROM erased) OR request_id = ANY (CAST(:ids AS uuid[]))
        OR id IN (SELECT id FROM erased) OR id = ANY (CAST(:ids AS uuid[]))
)
SELECT count(*) FROM erased
""")
# Locked before they are discarded: a letter that somebody replays meanwhile is none any more, or waits.
LOCK_OPEN_LETTERS = Statement(f"""
SELECT letter_id FROM {{schema}}.dead_letters
WHERE {_ERASABLE} AND resolved_at IS NULL ORDER BY letter_id FOR UPDATE
""")
ERASE_LETTERS = Statement(f"""
WITH erased AS (
    UPDATE {{schema}}.dead_letters
    SET partition_key = NULL, headers = '{{}}', body = '', reason = 'erased', traceback = NULL, message_digest = NULL,
        replayable = false, resolution_reason = NULL, edited_body = NULL, ordering_key = NULL, fair_key = NULL,
        erasure_id = :erasure
    WHERE {_ERASABLE} AND resolved_at IS NOT NULL RETURNING letter_id, id
), attempts AS (
    UPDATE {{schema}}.failed_attempts SET reason = 'erased', traceback = ''
    WHERE letter_id IN (SELECT letter_id FROM erased) OR id IN (SELECT id FROM erased)
)
SELECT count(*) FROM erased
""")
# What operators wrote and chose. The name of a replay stays: its messages have their ids by it.
ERASE_RECORDS = Statement(f"""
WITH acted AS (
    UPDATE {{schema}}.actions SET
        target = CASE WHEN {_ACTION["target"]} THEN 'erased' ELSE target END,
        reason = CASE WHEN {_ACTION["reason"]} OR {_COPIED} THEN NULL ELSE reason END,
        before = CASE WHEN {_ACTION["before"]} THEN NULL ELSE before END,
        after = CASE WHEN {_ACTION["after"]} THEN NULL ELSE after END
    WHERE {_ERASABLE_ACTION}
), paused AS (
    UPDATE {{schema}}.circuits SET reason = 'erased' WHERE {_ERASABLE_CIRCUIT}
)
UPDATE {{schema}}.replays SET plan = (
    SELECT jsonb_object_agg(part.key, CASE WHEN {_ERASABLE_PART} THEN CAST(:erased_part AS jsonb) ELSE part.value END)
    FROM jsonb_each(plan) AS part
) WHERE {_ERASABLE_REPLAY}
""")

# ---------------------------------------------------------------- the record

BEGIN_ERASURE = Statement("""
INSERT INTO {schema}.erasures (erasure_id, service, actor, reason, chosen_by, chosen_count, choice_digest)
VALUES (:erasure_id, :service, :actor, :reason, :chosen_by, :chosen_count, :choice_digest)
ON CONFLICT (erasure_id) DO UPDATE SET finished_at = NULL
""")
COUNT_ERASED = Statement("""
UPDATE {schema}.erasures SET history_rows = history_rows + :history, letter_rows = letter_rows + :letters
WHERE erasure_id = :erasure
""")
FINISH_ERASURE = Statement("""
UPDATE {schema}.erasures SET finished_at = clock_timestamp(), lake = :lake, lake_id = :lake_id,
    lake_history_rows = :lake_history, lake_letter_rows = :lake_letters
WHERE erasure_id = :erasure
""")
_READ: Final = """
SELECT erasure_id, service, actor, reason, chosen_by, chosen_count, choice_digest, began_at, finished_at, history_rows,
    letter_rows, lake, lake_id, lake_history_rows, lake_letter_rows
FROM {schema}.erasures"""
READ_ERASURES = Statement(f"{_READ} ORDER BY began_at, erasure_id")
# The unfinished ones first: they need somebody.
READ_SOME_ERASURES = Statement(f"""{_READ}
ORDER BY finished_at IS NOT NULL, began_at DESC, erasure_id LIMIT :limit
""")
