"""Messages as data: from Postgres into a lake, through Spark, and back into the outbox.

    Postgres of a service                 lake: Delta tables in a folder or an object store
    ┌───────────────────┐   archive      ┌───────────────────────────┐   report · audit · conversations
    │ envelope_history  ├───────────────>│ history/day=.../*.parquet ├───────────────────────────────> tables, a page
    │ dead_letters      │   purge        │ dead_letters/day=...      │
    │                   │<───verified────┤ each with a _delta_log/   ├───┐
    │ outgoing_envelopes│                └───────────────────────────┘   │
    │                   │<───────────────────────────────────────────────┘
    └───────────────────┘   replay, df.write.format("durable")

    columns    the tables' columns in SQL, Arrow and Spark
    session    the Spark session: in this process, on a cluster, or over Spark Connect
    lake       the Delta tables: what was committed, up to where, and how Spark reads it
    lost_lives rows of a life that a database has lost: foreign finds them, the audit passes over them
    describing what the tables say of themselves: comments, properties, their format
    erasing    content of chosen messages goes for good: lake_erasure · blanking · leftovers · erasures (the record)
    iceberg    the same files as Iceberg tables
    publish    a DataFrame as messages, and their ids: publishable · screens · contents · writer
    replay     archived messages once more; choosing says which, replayable with columns of which types

Nothing here is imported by the rest of durable, and Spark only where a function needs it.
"""
