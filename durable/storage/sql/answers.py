"""The SQL statements about answers that are kept for whoever waits for them, by the ids of their requests.

A request has one answer from each endpoint, the first that came: no peer takes the place of another's, or of this
service's own. One that was forgotten stays as a row without a body: a late answer is not kept then.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Batched, Statement, by_key

_COLUMNS: Final = "id, endpoint, message_type, source, content_type, headers, body, sent_at"

# In the transaction that finishes them: the rows are still there, and belong to this node.
KEEP = Statement(f"""
INSERT INTO {{schema}}.answers (request_id, {_COLUMNS})
SELECT wanted.request_id, {", ".join(f"row.{name}" for name in _COLUMNS.split(", "))}
FROM unnest(CAST(:request_ids AS uuid[]), CAST(:ids AS uuid[]), CAST(:endpoints AS text[]))
    AS wanted (request_id, id, endpoint)
JOIN {{schema}}.incoming_envelopes AS row ON row.id = wanted.id AND row.endpoint = wanted.endpoint
ON CONFLICT (request_id, endpoint) DO NOTHING
RETURNING id
""")
READ = Statement(f"""
SELECT request_id, {_COLUMNS.replace("headers", "CAST(headers AS text) AS headers")}
FROM {{schema}}.answers WHERE request_id = ANY (CAST(:request_ids AS uuid[])) ORDER BY kept_at, endpoint
""")
FORGET = Statement("""
INSERT INTO {schema}.answers (request_id, endpoint) VALUES (CAST(:request_id AS uuid), CAST(:endpoint AS text))
ON CONFLICT (request_id, endpoint) DO UPDATE SET id = NULL, message_type = NULL, source = NULL,
    content_type = NULL, headers = NULL, body = NULL, sent_at = NULL
""")
# Who sees that answer in a snapshot sees the id of its request as well: no answer of now is taken for a former one.
FORGET_FORMER = Statement("""
DELETE FROM {schema}.answers WHERE request_id = CAST(:request_id AS uuid) AND endpoint = CAST(:endpoint AS text)
    AND NOT EXISTS (
        SELECT FROM {schema}.undated_ids AS known
        WHERE known.id = CAST(:request_id AS uuid) AND known.endpoint = CAST(:came_to AS text) AND NOT known.given_up)
""")
PURGE: Final = Batched(
    """
    SELECT request_id, endpoint FROM {schema}.answers WHERE kept_at < clock_timestamp() - CAST(:keep AS interval){only}
    ORDER BY kept_at LIMIT :batch_size {lock}""",
    """, purged AS (
    DELETE FROM {schema}.answers AS row USING picked
    WHERE row.request_id = picked.request_id AND row.endpoint = picked.endpoint RETURNING 1
)
SELECT count(*) FROM purged
""",
    key="request_id, endpoint",
    only=by_key("endpoint").replace("(id,", "(request_id,", 1),
)
