"""The data of a private Postgres: made by `initdb`, which may be killed on its way.

    data folder   initdb ──> PG_VERSION, files and folders of its own ──> server starts ──> postmaster.opts
                  killed ──> half-made, and made anew                     never removed again

The server writes `postmaster.opts` at each start, and a base backup, which lacks it, has its `backup_label`. So data
are half-made that have nothing but what `initdb` makes, and no database of a user.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from durable.embedded.account import give, options, way_to
from durable.embedded.folders import write
from durable.embedded.wheel import Programs
from durable.errors import InvalidSetting

_BY_INITDB: Final = re.compile(r"pg_.*|PG_VERSION|base|global|postgresql(\.auto)?\.conf|log|postmaster\.pid")
_FIRST: Final = "pg_wal"
_FIRST_OF_USERS: Final = 16_384
"""The number of the first database, and of the first table, that `initdb` does not make."""

_OPTIONS: Final = ("--auth=trust", "--auth-local=trust", "--encoding=utf8", "-U", "postgres")
_LOCALE: Final = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8")
_FIRST_WITH_LOCALE: Final = 17
"""The first version that has this locale on every machine; earlier ones know the case of ASCII letters alone."""

SETTINGS: Final = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "log_min_messages": "fatal",
    "max_prepared_transactions": "20",  # applications may commit in two phases
}


def make_ready(data: Path, programs: Programs) -> None:
    """Make the data unless they are there, and write the settings. No server may run on them.

    Raises InvalidSetting when they cannot be made, or belong to another version.
    """
    data.mkdir(parents=True, exist_ok=True)
    if is_half_made(data):
        _clear(data)
    check_version(data, programs)
    _check_others(data)
    give(data, programs.account)
    if not (data / "PG_VERSION").exists():
        _make(data, programs)
    configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
    write(data / "postgresql.auto.conf", configuration)


def is_half_made(data: Path) -> bool:
    """Tell whether `initdb` was killed on this data, or no server was ever started on them: nothing would be lost."""
    names = {path.name for path in data.iterdir()}
    by_initdb = _FIRST in names and all(map(_BY_INITDB.fullmatch, names))
    return by_initdb and not any(map(_is_of_users, data.glob("base/*/*")))


def check_version(data: Path, programs: Programs) -> None:
    """Raise InvalidSetting when the data belong to another version than these programs."""
    file = data / "PG_VERSION"
    found = file.read_text(errors="replace").strip() if file.exists() else str(programs.version)
    if found == str(programs.version):
        return
    folder = str(data.parent)
    if found.isdecimal():
        raise InvalidSetting(
            f"postgres: folder={folder!r}: its data are of Postgres {found}, not {programs.version};"
            f" give version={found}, if that is installed, or another folder"
        )
    raise InvalidSetting(f"postgres: folder={folder!r}: its data/PG_VERSION has no version; give another folder")


def _check_others(data: Path) -> None:
    """Raise InvalidSetting when other files are where the data are to be made."""
    names = sorted(path.name for path in data.iterdir())
    if names and "PG_VERSION" not in names:
        raise InvalidSetting(
            f"postgres: folder={str(data.parent)!r}: its data cannot be made: data/{names[0]} is in the way; move it,"
            " or give another folder"
        )


def _is_of_users(path: Path) -> bool:
    return any(name.isdecimal() and int(name) >= _FIRST_OF_USERS for name in (path.parent.name, path.name))


def _clear(data: Path) -> None:
    """Remove what `initdb` has made, the sign of it last: this may be killed, too."""
    for path in sorted(data.iterdir(), key=lambda path: path.name == _FIRST):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _make(data: Path, programs: Programs) -> None:
    way = way_to(data, programs.account)
    locale = _LOCALE if programs.version >= _FIRST_WITH_LOCALE else ()
    done = subprocess.run(
        [programs.folder / "initdb", *_OPTIONS, *locale, "-D", str(way)],
        **options(programs.account),
        cwd=data,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        folder = str(data.parent)
        told = done.stderr.strip() or "it has said nothing"
        raise InvalidSetting(
            f"postgres: folder={folder!r}: its data cannot be made; initdb ended with {done.returncode}:\n{told}"
        )
