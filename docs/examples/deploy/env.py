"""migrations/env.py of an application that has durable in the same database."""

import os

from alembic import context
from models import Base
from sqlalchemy import create_engine, pool


def include_name(name: str | None, type_: str, parent_names: object) -> bool:
    return type_ != "schema" or name != "durable"  # DURABLE_DB_SCHEMA, where that is another


engine = create_engine(os.environ["ALEMBIC_URL"], poolclass=pool.NullPool)  # postgresql+psycopg://...
with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_schemas=True,
        include_name=include_name,
    )
    with context.begin_transaction():
        context.run_migrations()
