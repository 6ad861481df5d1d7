-- How much of what was done a day, and how long it took from send() to its end. Late rows change the last days only.
{{ config(materialized='incremental', unique_key=['day', 'service', 'side', 'message_type', 'outcome']) }}
select
    day,
    service,
    side,
    message_type,
    outcome,
    count(*) as envelopes,
    sum(attempts) as retries,
    {{ milliseconds('min(finished_at - sent_at)') }} as fastest_ms,
    {{ milliseconds('max(finished_at - sent_at)') }} as slowest_ms
from {{ ref('stg_history') }}
{% if is_incremental() %}
where day >= (select max(day) from {{ this }}) - 2
{% endif %}
group by day, service, side, message_type, outcome
