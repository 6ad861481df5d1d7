-- A row for each envelope and side. Content is left out: who needs it reads the source.
select
    service,
    database,
    lower(hex(id)) as message_id,
    lower(hex(correlation_id)) as conversation_id,
    side,
    outcome,
    address,
    message_type,
    source,
    sent_at,
    finished_at,
    attempts,
    day,
    erasure_id is not null as is_erased
from {{ source('durable', 'history') }}
