-- Dead letters as they are now: a letter is archived again whenever it is resolved.
select * from (
    select
        service,
        database,
        letter_id,
        lower(hex(id)) as message_id,
        address,
        message_type,
        exception_type,
        fingerprint,
        failed_at,
        resolution,
        resolved_at,
        day,
        row_number() over (partition by service, database, letter_id order by xid desc) as age
    from {{ source('durable', 'dead_letters') }}
) as states
where age = 1
