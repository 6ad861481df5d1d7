"""Every number that an operator may want to change, with its unit and where its default comes from.

Each is read from the environment with the prefix DURABLE_ (`DURABLE_BATCH_SIZE=50`), can be given in code
(`Settings(batch_size=50)`) and as a flag (`durable-agent run app:bus --batch-size 50`). Durations are timedeltas,
seconds (`30`), text such as `10s`, `5m` and `1h30m`, or ISO 8601 (`PT30S`).
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypedDict

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from durable import database_url
from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.redaction import keep_secret
from durable.setting_errors import described
from durable.setting_types import (
    Count,
    Duration,
    DurationOrZero,
    Names,
    OneOrAuto,
    Pauses,
    Peer,
    Peers,
    SchemaName,
    Secret,
    Secrets,
    Words,
)

__all__ = ["Settings"]

PREFIX = "DURABLE_"
_NOT_SETTINGS = {"DURABLE_FAILPOINT"}  # read elsewhere; DURABLE_TEST_* belongs to the tests

PREFETCH: Final = 400
"""Deliveries of one queue that are prefetched by default: what a node stores at once; more were not faster."""

ENVELOPE_BYTES: Final = 64 << 10
"""The bytes of an envelope on the wire besides its body: its headers, its key and its names, in any alphabet."""


class Settings(BaseSettings):
    """The operator's settings. Unknown names are refused, with the nearest known one."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True)

    database_url: SecretStr | None = None
    """SQLAlchemy URL of the application's own Postgres"""
    lock_database_url: SecretStr | None = None
    """URL of a direct connection for the node's advisory lock, when database_url goes through a pooler"""
    pooler: Literal["auto", "none", "transaction"] = "auto"
    """pooler in transaction mode (PgBouncer) on the way of database_url; auto: find out"""
    db_schema: SchemaName = "durable"
    """schema that holds the tables"""
    pool_size: Count = 10
    """connections for units of work and handlers"""
    agent_pool_size: Count = 4
    """connections for the agents, so that a busy application starves none"""
    pool_timeout: Duration = timedelta(seconds=30)
    """longest wait for a free connection for units of work and handlers; SQLAlchemy's default"""
    statement_timeout: Duration = timedelta(seconds=15)
    """longest statement of the agents, which take milliseconds; 5 s later its connection is given up"""
    tcp_user_timeout: Duration = timedelta(seconds=8)
    """longest wait for the database's machine to acknowledge a packet; below any wait for a lock"""

    batch_size: Annotated[int, Field(ge=1, le=1000)] = 100
    """envelopes in a batch; 100 rows in one statement is where the measured gain flattens"""
    batch_bytes: Count = 1 << 20
    """bytes in a batch"""
    batches_in_flight: Count = 4
    """full batches under way to one destination"""
    buffer_size: Count = 2_000
    """envelopes in memory for each destination and each handler"""
    buffer_bytes: Count = 32 << 20
    """bytes in memory for each destination and each handler"""
    max_message_bytes: Count = 1 << 20
    """largest body of one message"""
    validate_sent: bool = True
    """check at send() that a receiver reads every field of the message as it was sent"""
    max_headers: Annotated[int, Field(ge=1, le=1_000)] = 100
    """headers of one message"""
    max_header_bytes: Annotated[int, Field(ge=1, le=32 << 10)] = 8 << 10
    """bytes in the headers of one message; web servers take as much"""
    max_frame_bytes: Count = 4 << 20
    """largest TCP frame"""

    failures_to_latch: Count = 3
    """batches that fail in a row before a destination is latched"""
    ping_interval: Duration = timedelta(seconds=1)
    """time between pings of a latched destination"""
    send_timeout: Duration = timedelta(seconds=10)
    """longest wait for the answer to one batch"""
    connect_timeout: Duration = timedelta(seconds=5)
    """longest time for a connection and its handshake"""
    idle_timeout: Duration = timedelta(seconds=30)
    """silence after which a connection is dropped"""
    frame_timeout: Duration = timedelta(seconds=10)
    """longest time for a frame to arrive, from its first byte"""
    busy_pause: Duration = timedelta(milliseconds=20)
    """pause before the next batch to a peer, or into an inbox, that was busy; it doubles each time"""
    busy_pause_longest: Duration = timedelta(seconds=1)
    """longest pause between batches to a peer, or into an inbox, that stays busy"""
    reconnect_pause: Duration = timedelta(milliseconds=200)
    """pause before a lost connection of a RabbitMQ listener, or of connect(), is opened again; it doubles each time"""
    reconnect_pause_longest: Duration = timedelta(seconds=5)
    """longest pause between attempts to open such a connection again"""
    tcp_connections: Count = 100
    """peers connected to one TCP listener; each needs one"""
    idle_connections: Count = 200
    """TCP peers, and HTTP peers, whose connections stay open while nothing is sent; the longest unused are closed"""
    http_connections: Count = 500
    """connections of one HTTP listener whose clients have shown a secret; the idle give way"""
    stranger_connections: Count = 100
    """connections of one listener whose peers have not proved yet who they are; the oldest give way"""
    connections_per_address: Count = 100
    """connections of one listener from one address; more where a proxy stands before it"""
    delete_linger: Duration = timedelta(milliseconds=50)
    """time for which acknowledged rows gather before one statement deletes them"""

    call_timeout: Duration = timedelta(seconds=1)
    """longest wait for the result of a call to another service, unless its method says otherwise"""
    call_concurrency: Count = 100
    """calls of this process's services that run at once"""
    call_backlog: Annotated[int, Field(ge=0, le=1_000_000)] = 1_000
    """calls that wait for their turn before more are refused"""
    call_lease: Duration = timedelta(seconds=30)
    """silence of this process after which those that it is connected to forget what it offers; within their bounds"""
    call_lease_shortest: Duration = timedelta(seconds=15)
    """shortest lease that a connected process may choose"""
    call_lease_longest: Duration = timedelta(minutes=2)
    """longest lease that a connected process may choose, and the first one of each connection"""
    call_host: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="name of this host in the addresses of listeners that listen everywhere, such as 0.0.0.0, as other "
        "processes call them; default: what the machine says",
    )
    common_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="name of this process for people, told to those it is connected to; default: host and service",
    )

    concurrency: Count = 8
    """messages that one handler runs at once, unless it says otherwise"""
    max_batch: OneOrAuto = "auto"
    """messages that share a transaction, unless their handler says otherwise: 1, or auto, as many as take group_time"""
    on_dead_letter: Literal["continue", "park"] = "continue"
    """effect of a dead letter on its key: later messages go on, or the key is parked"""
    on_expiry: Literal["forget", "dead-letter"] = "forget"
    """end of a message whose deliver_by has passed: left to the history, or a dead letter"""
    handler_timeout: Duration = timedelta(seconds=60)
    """longest attempt of a handler"""
    group_time: DurationOrZero = timedelta(milliseconds=20)
    """time for which waiting messages of a handler with max_batch="auto" share a transaction; 0: each has its own"""
    unit_of_work_timeout: Duration = timedelta(seconds=60)
    """longest statement of a unit of work, and longest pause between statements of its transaction"""
    drain_timeout: Duration = timedelta(seconds=10)
    """time for work under way when the node stops"""
    start_timeout: Duration = timedelta(seconds=30)
    """longest wait of a starting process for a database that is away"""
    step_timeout: Duration = timedelta(minutes=2)
    """longest step of an agent, beyond its own deadlines, before its node ends and joins again"""
    membership_timeout: Duration = timedelta(minutes=5)
    """longest time without a node while the database can be used, or of an event loop's standstill"""
    on_stuck: Literal["exit", "report"] | None = Field(
        default=None,
        description="end the process when an agent cannot be stopped or membership_timeout has passed, or only report "
        "it; by default a process of the bus alone (bus.run(), bus.serve()) ends, and one of an application reports",
    )
    retry_immediate: Annotated[int, Field(ge=0, le=1_000)] = 2
    """attempts at once after a failure, for handlers without a retry= of their own"""
    retry_delays: Pauses = (
        timedelta(seconds=1),
        timedelta(seconds=10),
        timedelta(seconds=60),
    )
    """pauses before the attempts after those, such as 1s,10s,60s: most faults have passed by then"""
    retry_jitter: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """part by which each pause varies, so that failures do not come back all together"""
    retry_max_age: Duration | None = None
    """age of a message from which on it runs no more attempts"""
    kept_attempts: Annotated[int, Field(ge=1, le=1_000)] = 20
    """failed attempts of one message that are kept with their tracebacks, the last ones"""
    settling_time: Duration = timedelta(seconds=10)
    """time beyond handler_timeout for a node to report the result of a stopped handler's trial"""
    check_pending: Annotated[int, Field(ge=0, le=1_000_000)] = 1_000
    """messages of each type that are decoded before a node starts, the oldest and the newest; 0: none"""
    pause_undecodable: bool = False
    """pause the types that do not decode then, on every node, instead of not starting"""

    answer_to: Words = Field(
        default=(),
        description="addresses for answers besides declared destinations: a list with commas, or a JSON array; an "
        "address that ends with /* allows those below it, * any",
    )
    address_idle: Duration = timedelta(minutes=10)
    """time after which an undeclared address is forgotten when no message waits for it, or one that nobody calls"""

    amqp_url: SecretStr | None = None
    """URL of the RabbitMQ broker 'default', such as amqps://user:***@host:5671/vhost"""
    amqp_brokers: Secrets = {}
    """more brokers: a JSON object of URLs by name"""
    amqp_exchange: str = Field(default="durable", min_length=1, max_length=100)
    """topic exchange of addresses with topic"""
    amqp_queue_type: Literal["quorum", "classic"] = "quorum"
    """type of the declared queues, unless their URI names another"""
    amqp_expiration: bool = False
    """give deliver_by to the broker as expiration: for queues that dead-letter, as others lose it"""
    amqp_ordered: bool = False
    """one listener at a time has all of a queue, so that keys keep their order; or as its URI says"""
    amqp_prefetch: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        default=None,
        description="unacknowledged deliveries of one queue; by default 400, and once they have more than "
        "buffer_bytes, as many of the largest messages as it holds",
    )

    shared_secret: Secret | None = None
    """secret that peers must know which have none of their own, and that is shown to them"""
    previous_shared_secret: Secret | None = None
    """former secret, accepted too while shared_secret is being changed everywhere"""
    peers: Peers = Field(
        default={},
        description="services with secrets or certificates of their own: a JSON object by name, of their secrets, "
        "names in certificates, addresses (at), and what they may send (types, endpoints) and offer (offers)",
    )
    http_auth: Literal["hmac", "bearer"] = "hmac"
    """form in which the secret is shown to peers: a signature, or itself; both are accepted"""
    http_clock_skew: Duration = timedelta(minutes=5)
    """largest difference of two HTTP peers' clocks, with the time of a request; as Kerberos allows"""
    allow_plaintext: bool = False
    """reach other hosts, and be reached by them, over http:// and amqp://, which everybody on the way can read"""
    tls_certificate: Path | None = None
    """certificate chain of https:// and tcp:// listeners and of tcp:// senders, PEM"""
    tls_key: Path | None = None
    """private key of tls_certificate, PEM"""
    tls_ca: Path | None = Field(
        default=None,
        description="authorities that sign the certificates of peers, PEM, instead of the public ones; "
        "tcp:// listeners with a certificate then demand one of each peer",
    )

    encryption_keys: Secrets = Field(
        default={},
        description="keys of encrypted bodies: a JSON object by id, each 32 bytes in base64; the first encrypts, all "
        "decrypt",
    )
    encryption_tenants: Names = Field(
        default={},
        description="id of the key that encrypts for a tenant: a JSON object by tenant; others get the first",
    )
    encryption_key_file: Path | None = Field(
        default=None,
        description="JSON file with keys (and encrypts, tenants) instead of encryption_keys; its changes are followed",
    )
    encryption_reload: Duration = timedelta(seconds=30)
    """time between looks for changed keys in encryption_key_file, or by the function of Bus.keys_from()"""
    encrypt_all: bool = False
    """encrypt the bodies of all messages, not only of classes declared with encrypted=True"""

    unix_users: Words = ()
    """users besides the own one at the other end of unix:// sockets: names or numbers"""
    unix_groups: Words = ()
    """groups whose users may be at the other end of unix:// sockets: names or numbers"""

    heartbeat_interval: Duration = timedelta(seconds=2)
    """time between heartbeats of a node"""
    heartbeat_stale: Duration = timedelta(seconds=20)
    """time for which a heartbeat must stay the same before a node that holds its lock is suspect all the same"""
    dormant_grace: Duration = timedelta(seconds=2)
    """time for which a node must be suspect, its lock absent or its heartbeat stale, before it is dormant"""
    sweep_interval: Duration = timedelta(seconds=1)
    """time between looks for dormant nodes"""
    poll_interval: Duration = timedelta(seconds=1)
    """time between looks for unowned and due work"""
    recovery_batch_size: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """rows that one statement releases, makes due or expires; it takes some 10 ms"""
    forgotten_after: Duration = timedelta(seconds=15)
    """time after which a node releases rows that it owns and does not work on"""

    dedupe_window: Duration = timedelta(days=7)
    """time for which a duplicate is recognised"""
    clock_lead: Duration = timedelta(days=1)
    """time by which the id and sent_at of an arriving message may be ahead; it is a dead letter beyond"""
    history_retention: Duration = timedelta(days=30)
    """time for which the history is kept"""
    history_bodies: bool = False
    """keep bodies and headers in the history, to replay messages from an archive of it"""
    lake: str | None = None
    """place where the pipeline keeps history: a folder, or the URL of an object store"""
    pipeline_local_rows: Annotated[int, Field(ge=0)] = 200_000
    """rows up to which the pipeline avoids Spark: they are read sooner than it starts"""
    pipeline_compact_above: Count = 100
    """files of a day of the lake above which an archive makes few large ones of them"""
    pipeline_keep_replaced: Duration = timedelta(days=7)
    """time for which files of the lake stay after others have replaced them"""
    dead_letter_retention: Duration = timedelta(days=90)
    """time for which a dead letter is kept after it was resolved"""
    answer_retention: Duration = timedelta(days=7)
    """time for which the answer to a request is kept for whoever waits for it"""
    action_retention: Duration = timedelta(days=365)
    """time for which the record of an operator's action is kept"""
    partitions_ahead: Annotated[int, Field(ge=1, le=366)] = 7
    """days for which partitions are made ahead"""
    maintenance_interval: Duration = timedelta(minutes=10)
    """time between runs of the maintenance task"""

    purge_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """old ids and rows of history that one statement of the maintenance task deletes"""
    purge_letters_batch_size: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """old dead letters that one statement deletes; fewer, for each has a body"""

    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """serve /metrics to Prometheus, and /health, on this port; 0: on a free one"""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """host address of metrics_port"""
    health_unattended: Duration = timedelta(minutes=1)
    """time for which work may wait without a live node, or be overdue, until the service is unhealthy"""
    health_lag: Duration | None = None
    """age of a waiting message from which on the service is unhealthy"""
    health_latched: Duration | None = None
    """time for which a destination may be latched until the service is unhealthy"""
    health_dead_letters: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """unresolved dead letters from which on the service is unhealthy"""

    if not TYPE_CHECKING:  # checkers know the fields, and would know nothing of **values

        def __init__(self, **values: Any) -> None:
            """Build settings from these values. Raises InvalidSetting with one line that names the setting, its value
            and the values allowed.
            """
            for name in values:
                if not name.startswith("_"):  # those of pydantic-settings itself
                    _refuse_unknown(name, set(type(self).model_fields))
            try:
                super().__init__(**{name: value for name, value in values.items() if not _leaves_out(name, value)})
            except ValidationError as error:
                raise InvalidSetting(described(error, _may_hold_a_secret)) from None
            keep_secret(_secrets_of(self))

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave out sources without any setting: each looks for all of them, for more than a millisecond."""
        return tuple(each for each in (*sources, *named.values()) if _has_any(each))

    @property
    def limits(self) -> Limits:
        """Limits of one envelope."""
        return Limits(
            max_message_bytes=self.max_message_bytes,
            max_headers=self.max_headers,
            max_header_bytes=self.max_header_bytes,
        )

    @property
    def prefetch(self) -> int:
        """Unacknowledged deliveries of one queue."""
        return self.amqp_prefetch or PREFETCH

    @property
    def prefetch_of_large(self) -> int:
        """The same where messages are large: a broker knows no limit in bytes."""
        return self.amqp_prefetch or max(1, self.buffer_bytes // self.max_message_bytes)

    @property
    def keep_ids(self) -> timedelta:
        """Time for which an id is remembered: a day longer than `dedupe_window`, so that no clock skew reopens it."""
        return self.dedupe_window + timedelta(days=1)

    @property
    def window(self) -> Window:
        """Time in which an arriving envelope must have been made."""
        return Window(dedupe_window=self.dedupe_window, clock_lead=self.clock_lead)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_message_bytes + ENVELOPE_BYTES > self.max_frame_bytes:
            raise ValueError(
                f"max_message_bytes ({self.max_message_bytes:,}) must be at least {ENVELOPE_BYTES:,} below "
                f"max_frame_bytes ({self.max_frame_bytes:,}): a frame holds a message with its headers"
            )
        for first, longest in (
            ("busy_pause", "busy_pause_longest"),
            ("reconnect_pause", "reconnect_pause_longest"),
            ("call_lease_shortest", "call_lease_longest"),
        ):
            if getattr(self, first) > getattr(self, longest):
                raise ValueError(f"{first} must not be above {longest}")
        if self.heartbeat_stale < 3 * self.heartbeat_interval:
            raise ValueError("heartbeat_stale must be at least three times heartbeat_interval")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: give both or neither")
        if self.encryption_keys and self.encryption_key_file is not None:
            raise ValueError("encryption_keys and encryption_key_file: give one of them")
        if self.encryption_tenants and not self.encryption_keys:
            raise ValueError("encryption_tenants: name keys of encryption_keys; a file has its own tenants")
        for address in self.answer_to:
            if "*" in address and address != "*" and (not address.endswith("/*") or address.count("*") > 1):
                raise ValueError(f"answer_to: {address!r}: a * stands alone, or at the end behind a slash")
            if address != "*" and "://" not in address:
                raise ValueError(
                    f"answer_to: {address!r} is no address; "
                    "give a list of addresses, such as tcp://127.0.0.1:2303, or *"
                )
        if self.dedupe_window < timedelta(hours=1):
            raise ValueError("dedupe_window must be at least an hour: retries and recovered work arrive late")
        if self.clock_lead > timedelta(days=self.partitions_ahead):
            raise ValueError("clock_lead must not be above partitions_ahead, in days: ids are kept by their day")
        return self


class Limits(TypedDict):
    """Limits of one envelope, for durable.messages.validation."""

    max_message_bytes: int
    max_headers: int
    max_header_bytes: int


class Window(TypedDict):
    """Time in which an envelope must have been made, for durable.messages.validation."""

    dedupe_window: timedelta
    clock_lead: timedelta


def load_settings(**overrides: Any) -> Settings:
    """Build settings from the environment and these overrides.

    Raises InvalidSetting with one line that names the setting, its value and what it may be.
    """
    known = {name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in _NOT_SETTINGS and not variable.startswith("DURABLE_TEST_"):
            name = variable.removeprefix(PREFIX).upper()
            if name not in known:
                raise InvalidSetting(f"{variable}: unknown setting{suggestion(name, known, PREFIX + '{}')}")
    settings = Settings(**overrides)
    for name in ("database_url", "lock_database_url"):
        url: SecretStr | None = getattr(settings, name)
        if url is not None:
            database_url.parse(url.get_secret_value(), name)
    return settings


def _has_any(source: PydanticBaseSettingsSource) -> bool:
    match source:
        case EnvSettingsSource():
            return any(name.lower().startswith(source.env_prefix.lower()) for name in source.env_vars)
        case SecretsSettingsSource():
            return source.secrets_dir is not None
        case _:
            return True


def _leaves_out(name: str, value: Any) -> bool:
    """True for None where a setting has nothing by default: an empty list or object."""
    return value is None and name in Settings.model_fields and Settings.model_fields[name].default in ((), {})


def _secrets_of(settings: Settings) -> list[str]:
    found: list[str] = []
    for name in Settings.model_fields:
        value = getattr(settings, name)
        each = value.values() if isinstance(value, dict) else [value]
        each = [one for part in each for one in (part.secrets.values() if isinstance(part, Peer) else [part])]
        found += [one.get_secret_value() for one in each if isinstance(one, SecretStr)]
    return found


def secret_names() -> list[str]:
    """Return the names of the settings that hold secrets, or URLs that may."""
    return [name for name in Settings.model_fields if _may_hold_a_secret(name)]


def _may_hold_a_secret(name: str) -> bool:
    annotation = str(Settings.model_fields[name].annotation) if name in Settings.model_fields else ""
    return "SecretStr" in annotation or "Peer" in annotation


def _refuse_unknown(name: str, known: set[str]) -> None:
    if name not in known:
        raise InvalidSetting(f"{name}: unknown setting{suggestion(name, known)}")
