"""Alembic's environment: which database, which schema.

`durable-agent migrate` passes both in `config.attributes`; with the plain alembic command they come from
DURABLE_DATABASE_URL and DURABLE_DB_SCHEMA.
"""

from __future__ import annotations

from alembic import context

from durable.settings import load_settings
from durable.storage.database import sync_url
from durable.storage.migrator import configure_offline, migrate_online

attributes = context.config.attributes
if "schema" not in attributes:
    settings = load_settings()
    attributes["schema"] = settings.db_schema
    attributes["url"] = sync_url(settings)

if context.is_offline_mode():
    configure_offline(context, attributes["schema"])
    with context.begin_transaction():
        context.run_migrations()
else:
    migrate_online(context, attributes["url"], attributes["schema"])
