"""The SQL of parked messages: their bodies are encrypted with keys that the nodes which had them do not have.

A parked row is owned by no node and claimed by none, and it holds its ordering key, as any owned row does.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import key_id_of
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX

PARKED_OWNER: Final = -2
"""Owner of a message that waits for its key."""

PARK = Statement(f"""
UPDATE {INBOX.rows} AS row SET owner_id = {PARKED_OWNER}, epoch = row.epoch + 1 FROM {INBOX.mine}
""")
# What is too late is released, too: it expires as any other.
RELEASE_PARKED = INBOX.next(
    f"""owner_id = {PARKED_OWNER} AND (
        deliver_by <= now() OR {key_id_of("body")} = ANY (CAST(:key_ids AS text[]))){{only}}
    ORDER BY seq LIMIT :batch_size""",
    f""", released AS (
    UPDATE {INBOX.rows} AS row SET owner_id = 0, epoch = row.epoch + 1 FROM picked
    WHERE {INBOX.same_as("picked")} RETURNING 1
)
SELECT count(*) FROM released
""",
)
# Counted up to a limit: monitors ask every few seconds.
COUNT_PARKED = Statement(f"""
SELECT {key_id_of("body")} AS key_id, count(*) AS waiting, clock_timestamp() - min(received_at) AS oldest_age FROM (
    SELECT body, received_at FROM {INBOX.rows} WHERE owner_id = {PARKED_OWNER} LIMIT :limit) AS parked
GROUP BY key_id ORDER BY key_id
""")
