"""The SQL that asks whether every row of the tables can be seen."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.statement import Statement

# Partitions have policies of their own, which hold where they are read directly. The server knows of owners, of FORCE
# and of BYPASSRLS.
READ_VEILED: Final = Statement("""
SELECT quote_ident(current_user) AS role, quote_ident(c.relname) AS relation
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = :schema AND c.relkind IN ('r', 'p') AND c.relrowsecurity AND row_security_active(c.oid)
ORDER BY c.relname
""")
