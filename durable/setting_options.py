"""Settings as keywords of Bus() and configure(), for type checkers: what each may be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import SecretStr

from durable.duration import Duration
from durable.setting_types import Peer


class SettingOptions(TypedDict, total=False):
    """Settings by name. durable.settings says what each is for, its default and its bounds."""

    database_url: str | SecretStr | None
    lock_database_url: str | SecretStr | None
    pooler: Literal["auto", "none", "transaction"]
    db_schema: str
    pool_size: int
    agent_pool_size: int
    pool_timeout: Duration
    statement_timeout: Duration
    tcp_user_timeout: Duration
    batch_size: int
    batch_bytes: int
    batches_in_flight: int
    buffer_size: int
    buffer_bytes: int
    max_message_bytes: int
    validate_sent: bool
    max_headers: int
    max_header_bytes: int
    max_frame_bytes: int
    failures_to_latch: int
    ping_interval: Duration
    send_timeout: Duration
    connect_timeout: Duration
    idle_timeout: Duration
    frame_timeout: Duration
    busy_pause: Duration
    busy_pause_longest: Duration
    reconnect_pause: Duration
    reconnect_pause_longest: Duration
    tcp_connections: int
    idle_connections: int
    http_connections: int
    stranger_connections: int
    connections_per_address: int
    delete_linger: Duration
    call_timeout: Duration
    call_concurrency: int
    call_backlog: int
    call_lease: Duration
    call_lease_shortest: Duration
    call_lease_longest: Duration
    call_host: str | None
    common_name: str | None
    concurrency: int
    max_batch: Literal[1, "auto"]
    on_dead_letter: Literal["continue", "park"]
    on_expiry: Literal["forget", "dead-letter"]
    handler_timeout: Duration
    group_time: Duration
    unit_of_work_timeout: Duration
    drain_timeout: Duration
    start_timeout: Duration
    step_timeout: Duration
    membership_timeout: Duration
    on_stuck: Literal["exit", "report"] | None
    retry_immediate: int
    retry_delays: Sequence[Duration] | str
    retry_jitter: float
    retry_max_age: Duration | None
    kept_attempts: int
    settling_time: Duration
    check_pending: int
    pause_undecodable: bool
    answer_to: Sequence[str] | str | None
    address_idle: Duration
    amqp_url: str | SecretStr | None
    amqp_brokers: Mapping[str, str | SecretStr] | str | None
    amqp_exchange: str
    amqp_queue_type: Literal["quorum", "classic"]
    amqp_expiration: bool
    amqp_ordered: bool
    amqp_prefetch: int | None
    shared_secret: str | SecretStr | None
    previous_shared_secret: str | SecretStr | None
    peers: Mapping[str, str | SecretStr | Peer | Mapping[str, Any]] | str | None
    http_auth: Literal["hmac", "bearer"]
    http_clock_skew: Duration
    allow_plaintext: bool
    tls_certificate: Path | str | None
    tls_key: Path | str | None
    tls_ca: Path | str | None
    encryption_keys: Mapping[str, str | SecretStr] | str | None
    encryption_tenants: Mapping[str, str] | str | None
    encryption_key_file: Path | str | None
    encryption_reload: Duration
    encrypt_all: bool
    unix_users: Sequence[str] | str | None
    unix_groups: Sequence[str] | str | None
    heartbeat_interval: Duration
    heartbeat_stale: Duration
    dormant_grace: Duration
    sweep_interval: Duration
    poll_interval: Duration
    recovery_batch_size: int
    forgotten_after: Duration
    dedupe_window: Duration
    clock_lead: Duration
    history_retention: Duration
    history_bodies: bool
    lake: str | None
    pipeline_local_rows: int
    pipeline_compact_above: int
    pipeline_keep_replaced: Duration
    dead_letter_retention: Duration
    answer_retention: Duration
    action_retention: Duration
    partitions_ahead: int
    maintenance_interval: Duration
    purge_batch_size: int
    purge_letters_batch_size: int
    metrics_port: int | None
    metrics_host: str
    health_unattended: Duration
    health_lag: Duration | None
    health_latched: Duration | None
    health_dead_letters: int | None
