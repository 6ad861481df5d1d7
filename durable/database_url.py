"""URL of a Postgres database, in every form in which users write it, and the same in the words of each driver.

    text                                     libpq: psycopg, ADBC, Spark's workers     asyncpg
    sslmode= sslrootcert= sslcert= sslkey=   the same                                  a DSN beside the other arguments
    ssl=true                                 sslmode=verify-full, sslrootcert=system   an SSLContext
    ssl=require                              sslmode=require                           as sslmode=require
    channel_binding= gssencmode= ...         the same                                  left out: it has none of them

Passwords may hold `@` and `:` as they are; `/` and `?` are percent-encoded. No error shows a part of the text. What is
accepted reaches the server as it is written: a NUL, where libpq's text would end, is refused in every part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

from durable.errors import InvalidSetting
from durable.grammar import several, suggestion

DRIVERS: Final = ("", "asyncpg", "psycopg")
MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
"""Values of sslmode, from the least to the most."""
SYSTEM: Final = "system"
"""Value of sslrootcert for the authorities of the operating system."""

TLS_WORDS: Final = frozenset(
    (
        *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version"),
    )
)
_LIBPQ_ALONE: Final = frozenset(
    (
        *("channel_binding", "client_encoding", "fallback_application_name", "gssdelegation", "gssencmode"),
        *("keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "load_balance_hosts"),
        *(
            "max_protocol_version",
            "min_protocol_version",
            "requirepeer",
            "sslcertmode",
            "sslcompression",
            "sslcrldir",
            "sslsni",
            "tcp_user_timeout",
        ),
    )
)
_FOR_THE_SERVER: Final = ("application_name", "options")
_OF_PSYCOPG_ALONE: Final = ("require_auth", "service", "servicefile")
_PLACE: Final = frozenset(("user", "password", "dbname", "port"))
_TAKEN: Final = frozenset(
    (
        *(*TLS_WORDS, *_LIBPQ_ALONE, *_FOR_THE_SERVER, *_OF_PSYCOPG_ALONE, *_PLACE),
        *("connect_timeout", "host", "hostaddr", "passfile", "ssl", "target_session_attrs"),
    )
)
_SESSION_ATTRS: Final = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")
_PORT: Final = 5432
_PORTS: Final = range(1, 1 << 16)
_ON: Final = ("1", "on", "true", "yes")
_OFF: Final = ("0", "off", "false", "no")

_TEXT: Final = re.compile(r"(?:postgres|postgresql)(?:\+([a-z0-9_]*))?://([^?]*)(?:\?(.*))?", re.DOTALL)
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")  # bytes of the environment that are not UTF-8 have become such
_NUL: Final = re.compile("\0|%00")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.%-]*)(?::([0-9]{1,5}))?")
_DIGITS: Final = re.compile(r"[0-9]{1,5}")
_SECONDS: Final = re.compile(r"-?[0-9]{1,9}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """Parts of a URL, decoded. `query` has the parameters in libpq's words; several `hosts`, each with its port, are
    tried in turn."""

    driver: str
    hosts: tuple[tuple[str, int | None], ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    database: str | None = None
    query: Mapping[str, str] = field(default_factory=dict, repr=False)

    def libpq(self, **defaults: str) -> str:
        """Return the URL for drivers that are built on libpq, with its password: not for showing."""
        password = "" if self.password is None else f":{quote(self.password, safe='')}"  # without a user, too
        userinfo = f"{quote(self.user or '', safe='')}{password}@" if self.user or password else ""
        hosts = ",".join(_written(host, port) for host, port in self.hosts)
        query = urlencode(defaults | dict(self.query), quote_via=quote)
        return f"postgresql://{userinfo}{hosts}/{quote(self.database or '', safe='')}" + (f"?{query}" if query else "")

    @property
    def is_local(self) -> bool:
        """True when the database is reached by a Unix socket or by loopback alone."""
        given = self.query.get("host", "")
        hosts = [host for host, _ in self.hosts if host] or given.split(",")
        return all(host.startswith(("/", "@", "127.")) or host in ("", "localhost", "::1") for host in hosts)


def parse(text: str, setting: str = "database_url") -> DatabaseUrl:
    """Parse the text. Raises InvalidSetting, which names the setting and shows no part of the text."""
    found = _TEXT.fullmatch(text)
    if found is None or _SURROGATE.search(text):
        raise _wrong(setting)
    if _NUL.search(text):
        raise InvalidSetting(f"{setting}: the URL holds a NUL (%00), which no name in Postgres has; leave it out")
    driver, head, query = found[1] or "", found[2], found[3] or ""
    if driver not in DRIVERS:
        raise InvalidSetting(f"{setting}: driver {driver!r} is not supported; use asyncpg or psycopg")
    authority, _, path = head.partition("/")
    userinfo, _, place = authority.rpartition("@")
    user, has_password, password = userinfo.partition(":")
    if "/" in path or "@" in path:
        raise _wrong(setting)
    try:
        hosts = tuple(_host(each, setting) for each in place.split(","))
        parts = [unquote(part, errors="strict") for part in (user, password, path)]
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict") if query else []
    except ValueError:
        raise _wrong(setting) from None
    _check_names([name for name, _ in pairs], query, setting)
    given = dict(pairs)
    own = {name: given.pop(name, None) for name in _PLACE}
    hosts = _places(hosts, given, own["port"], setting)
    _check_values(given, setting)
    return DatabaseUrl(
        driver,
        hosts,
        user=_one("user", parts[0] or None, own, setting),
        password=_one("password", parts[1] if has_password else None, own, setting),
        database=_one("dbname", parts[2] or None, own, setting),
        query=_tls(given, setting),
    )


def for_asyncpg(given: Mapping[str, object]) -> dict[str, object]:
    """Translate arguments of a connection from libpq's words: those of TLS become a DSN, others server settings.

    An empty `hostaddr`, which tells libpq to read no PGHOSTADDR, is left out.

    An argument `ssl` that is no text is asyncpg's own, and stays.
    """
    own = {name: value for name, value in given.items() if name not in TLS_WORDS | _LIBPQ_ALONE}
    if own.get("hostaddr") == "":
        del own["hostaddr"]
    tls = {name: str(value) for name, value in given.items() if name in TLS_WORDS}
    told = {name: str(own.pop(name)) for name in _FOR_THE_SERVER if name in own}
    if told:
        others = own.get("server_settings")
        own["server_settings"] = told | dict(others if isinstance(others, Mapping) else {})
    if "connect_timeout" in own:
        own["timeout"] = float(str(own.pop("connect_timeout")))
    if tls.get("sslrootcert") == SYSTEM:
        own["ssl"] = _of_system(tls)
    elif tls:
        own["dsn"] = f"postgresql://?{urlencode(tls, quote_via=quote)}"
    return own


def check_for_asyncpg(url: DatabaseUrl, setting: str = "database_url") -> None:
    """Raise InvalidSetting when the URL demands what asyncpg cannot do."""
    if url.query.get("channel_binding") == "require":
        raise InvalidSetting(
            f"{setting}: asyncpg has no channel_binding; use postgresql+psycopg://, or sslmode=verify-full without it"
        )
    for name in _OF_PSYCOPG_ALONE:
        if url.query.get(name):
            raise InvalidSetting(f"{setting}: asyncpg has no {name}; use postgresql+psycopg://, or leave it out")


def _check_names(names: Sequence[str], query: str, setting: str) -> None:
    """Refuse a parameter that no driver takes, by its position: its name may be a part of a password. And one that is
    given twice."""
    if not all(map(_NAME.fullmatch, names)):
        raise _wrong(setting)
    unknown = next((name for name in names if name not in _TAKEN), None)
    if unknown is None:
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise _twice(twice, setting)
        return
    if "@" in query:
        raise _wrong(setting)
    advice = suggestion(unknown, _TAKEN) or (
        "; take those of libpq, and options=-c%20NAME%3Dvalue for a setting of the server"
    )
    raise InvalidSetting(f"{setting}: parameter {names.index(unknown) + 1} of the URL is unknown{advice}")


def _one(name: str, written: str | None, parameters: Mapping[str, str | None], setting: str) -> str | None:
    """Return what stands at its place in the URL, or else in a parameter."""
    if written is None:
        return parameters[name]
    if parameters[name] not in (None, written):
        raise _twice(name, setting)
    return written


def _check_values(query: Mapping[str, str], setting: str) -> None:
    if not _SECONDS.fullmatch(query.get("connect_timeout", "0")):
        raise InvalidSetting(f"{setting}: connect_timeout is no number of seconds; give a whole one")
    if query.get("target_session_attrs", "any") not in _SESSION_ATTRS:
        raise InvalidSetting(f"{setting}: target_session_attrs is none of {', '.join(_SESSION_ATTRS)}")


def _places(
    written: tuple[tuple[str, int | None], ...], query: dict[str, str], port: str | None, setting: str
) -> tuple[tuple[str, int | None], ...]:
    """Return each host with its port. Parameters stand before the place of the URL; one `host` stays a parameter."""
    named = query["host"].split(",") if "," in query.get("host", "") else None
    if named is None and "host" in query:
        written = written[:1]
    hosts = [host for host, _ in written] if named is None else named
    ports = [each for _, each in written]
    if port is not None:
        ports = [_port(each, setting) for each in port.split(",")]
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        counted = f"{several(len(ports), 'ports')} for {several(len(hosts), 'hosts')}"
        raise InvalidSetting(f"{setting}: {counted}; give one port, or one for each")
    if named is not None:
        del query["host"]
    if len(hosts) > 1:
        if not all(each and each.isprintable() for each in hosts):
            raise InvalidSetting(f"{setting}: one of several hosts is empty or cannot be printed; name each")
        ports = [each or _PORT for each in ports]
    return tuple(zip(hosts, ports, strict=True))


def check_environment(url: DatabaseUrl, environment: Mapping[str, str]) -> DatabaseUrl:
    """Return the URL. Raises InvalidSetting when its port is that of the environment, and is none.

    Several hosts of PGHOST have as many ports. A service of libpq may have its own.
    """
    names_port = any(port is not None for _, port in url.hosts)
    names_service = "service" in url.query or environment.get("PGSERVICE")
    ports = environment.get("PGPORT")
    if ports and not names_port and not names_service and not all(map(_is_port, ports.split(","))):
        raise InvalidSetting(f"PGPORT: {ports!r} is no port; give one from {_PORTS[0]} to {_PORTS[-1]}, or unset it")
    return url


def _is_port(text: str) -> bool:
    return _DIGITS.fullmatch(text) is not None and int(text) in _PORTS


def _port(text: str, setting: str) -> int | None:
    if text and not _DIGITS.fullmatch(text):
        raise _wrong(setting)
    if text and int(text) not in _PORTS:
        raise InvalidSetting(f"{setting}: a port of the URL is no port; give one from {_PORTS[0]} to {_PORTS[-1]}")
    return int(text) if text else None


def _tls(query: dict[str, str], setting: str) -> dict[str, str]:
    """Say in libpq's words how the connection is encrypted."""
    ssl = query.pop("ssl", None)
    if ssl is not None:
        asked = {"sslmode": "verify-full"} if ssl.lower() in _ON else {"sslmode": ssl.lower()}
        if ssl.lower() in _OFF:
            asked = {"sslmode": "disable"}
        if query.get("sslmode", asked["sslmode"]) != asked["sslmode"]:
            raise InvalidSetting(f"{setting}: ssl and sslmode say different things; give sslmode alone")
        if ssl.lower() in _ON and "sslrootcert" not in query:
            asked["sslrootcert"] = SYSTEM
        query |= asked
    mode = query.get("sslmode")
    if mode is not None and mode not in MODES:
        raise InvalidSetting(f"{setting}: sslmode is none of {', '.join(MODES)}")
    if query.get("sslrootcert") == SYSTEM and mode != "verify-full":
        raise InvalidSetting(f"{setting}: sslrootcert=system needs sslmode=verify-full; anybody has such a certificate")
    if "sslcert" in query and "sslkey" not in query and mode is not None:
        raise InvalidSetting(f"{setting}: sslcert without sslkey; give both")
    return query


def _of_system(tls: Mapping[str, str]) -> object:
    import ssl

    context = ssl.create_default_context()
    if "sslcert" in tls:
        context.load_cert_chain(tls["sslcert"], tls.get("sslkey"), tls.get("sslpassword"))
    return context


def _host(text: str, setting: str) -> tuple[str, int | None]:
    found = _HOST.fullmatch(text)
    if found is None:
        raise _wrong(setting)
    host = unquote(found[1], errors="strict").strip("[]")
    if not host.isprintable() or "," in host:  # of several hosts
        raise _wrong(setting)
    return host, _port(found[2] or "", setting)


def _written(host: str, port: int | None) -> str:
    written = f"[{quote(host, safe=':')}]" if ":" in host else quote(host, safe="")
    return written if port is None else f"{written}:{port}"


def _twice(name: str, setting: str) -> InvalidSetting:
    return InvalidSetting(f"{setting}: {name} stands twice in the URL; give it once")


def _wrong(setting: str) -> InvalidSetting:
    return InvalidSetting(
        f"{setting}: not a Postgres URL; it should look like postgresql://user:***@host:5432/name, with"
        " / ? # and % in the password percent-encoded"
    )
