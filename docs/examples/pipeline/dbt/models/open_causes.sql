-- What operators have to look at: the causes of the letters that nobody has resolved.
select
    service,
    fingerprint,
    min(exception_type) as exception_type,
    min(message_type) as an_affected_type,
    count(*) as letters,
    min(failed_at) as since,
    max(failed_at) as latest
from {{ ref('stg_letters') }}
where resolution is null
group by service, fingerprint
