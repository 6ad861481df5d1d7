"""SQL statements about declared order and fairness."""

from __future__ import annotations

from durable.storage.sql.columns import ORDERED
from durable.storage.sql.ordering import HELD
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX

# In the order of the key: two nodes that start at once wait for each other in one order.
DECLARE_PLACEMENTS = Statement("""
INSERT INTO {schema}.placements AS known (side, name, ordering_key, fair_by)
SELECT side, name, ordering_key, fair_by FROM unnest(
    CAST(:side AS text[]), CAST(:name AS text[]), CAST(:ordering_key AS text[]), CAST(:fair_by AS text[])
) AS declared (side, name, ordering_key, fair_by)
ORDER BY side, name
ON CONFLICT (side, name) DO UPDATE SET ordering_key = excluded.ordering_key, fair_by = excluded.fair_by
WHERE (known.ordering_key, known.fair_by) IS DISTINCT FROM (excluded.ordering_key, excluded.fair_by)
""")
# Of each type whose order becomes another one: the order that it had, if messages or parks are left in it.
READ_LEFT_ORDERS = Statement(f"""
SELECT known.name, known.ordering_key FROM unnest(
    CAST(:name AS text[]), CAST(:ordering_key AS text[])
) AS declared (name, ordering_key) JOIN {{schema}}.placements AS known USING (name)
WHERE known.side = 'incoming' AND known.ordering_key <> declared.ordering_key AND (
    EXISTS (SELECT FROM {INBOX.rows} AS row WHERE {ORDERED} AND row.ordering_key = known.ordering_key)
    OR EXISTS (SELECT FROM {INBOX.rows} AS row WHERE {HELD} AND row.ordering_key = known.ordering_key)
    OR EXISTS (
        SELECT FROM {{schema}}.circuits
        WHERE kind = 'handler' AND parked AND circuits.ordering_key = known.ordering_key))
ORDER BY known.name
""")
READ_PLACEMENTS = Statement("""
SELECT side, name, ordering_key, fair_by FROM {schema}.placements
WHERE ordering_key IS NOT NULL OR fair_by IS NOT NULL
""")
