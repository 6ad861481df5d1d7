-- Dead letters as they are now: a letter is archived again whenever it is resolved. Numbers of letters come again where
-- a database was restored; message and time tell those letters apart.
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
        row_number() over (partition by service, database, letter_id, id, failed_at order by xid desc) as age
    from {{ source('durable', 'dead_letters') }}
) as states
where age = 1
