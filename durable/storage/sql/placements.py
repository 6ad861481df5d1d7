"""SQL statements about declared order and fairness."""

from __future__ import annotations

from durable.storage.sql.statement import Statement

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
READ_PLACEMENTS = Statement("""
SELECT side, name, ordering_key, fair_by FROM {schema}.placements
WHERE ordering_key IS NOT NULL OR fair_by IS NOT NULL
""")
