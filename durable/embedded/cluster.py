"""The data of a private Postgres: made by `initdb`, which may be killed on its way.

    data.durable-new   initdb ──> PG_VERSION, files and folders of its own ──> the mark "durable" ──> renamed: data
                       killed ──> removed, and made anew

So data are whole, and durable's own, or another's: data without the mark are refused before anything is touched. Data
of an earlier version of durable lack it; there the server's own file of its last start tells that durable started it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from durable.embedded.account import check_owner, give, options, way_to
from durable.embedded.folders import opened, unfinished, write
from durable.embedded.processes import is_by_durable
from durable.embedded.wheel import Programs
from durable.errors import InvalidSetting, said

MARK: Final = "durable"
_MARK_TEXT: Final = "durable.embedded starts and ends the server of these data, and writes its settings.\n"

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

    Raises InvalidSetting when they cannot be made, are another's, or belong to another version.
    """
    check_own(data)
    new = unfinished(data)
    _remove(new)
    if _names(data):
        check_version(data, programs)
        check_owner(data, programs.account)
        _mark(data)
    else:
        new.mkdir(0o700)
        give(new, programs.account)
        _make(new, programs)
        _mark(new)
        new.rename(data)
    configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
    write(data / "postgresql.auto.conf", configuration)


def check_own(data: Path) -> None:
    """Raise InvalidSetting when the data are another's. Data that are missing, or empty, are nobody's."""
    folder = str(data.parent)
    if data.is_symlink():
        raise InvalidSetting(
            f"postgres: folder={folder!r}: its data are a symbolic link to {os.readlink(data)}, which"
            " other folders may share; give a folder with data of its own"
        )
    try:
        names = _names(data)
        is_own = not names or MARK in names or is_by_durable(data)
    except OSError as error:
        raise InvalidSetting(
            f"postgres: folder={folder!r} cannot be used: {said(error)}; mend that, or give another folder"
        ) from error
    if is_own:
        return
    if "PG_VERSION" in names:
        raise InvalidSetting(
            f"postgres: folder={folder!r}: its data are another Postgres's, which durable leaves alone; give"
            f" another folder. If durable has made them, run: touch {data / MARK}"
        )
    raise InvalidSetting(
        f"postgres: folder={folder!r}: its data cannot be made: data/{names[0]} is in the way; move it, or give another"
        " folder"
    )


def check_version(data: Path, programs: Programs) -> None:
    """Raise InvalidSetting when the data belong to another version than these programs."""
    try:
        with opened(data / "PG_VERSION") as file:
            found = file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        found = ""
    if found == str(programs.version):
        return
    folder = str(data.parent)
    if found.isdecimal():
        raise InvalidSetting(
            f"postgres: folder={folder!r}: its data are of Postgres {found}, not {programs.version};"
            f" give version={found}, if that is installed, or another folder"
        )
    raise InvalidSetting(f"postgres: folder={folder!r}: its data/PG_VERSION has no version; give another folder")


def _names(data: Path) -> list[str]:
    try:
        return sorted(path.name for path in data.iterdir())
    except FileNotFoundError:
        return []


def _mark(data: Path) -> None:
    if not (data / MARK).exists():
        write(data / MARK, _MARK_TEXT)


def _remove(new: Path) -> None:
    """Remove what a killed `initdb` has left."""
    if new.is_symlink():
        new.unlink()
    elif new.exists():
        shutil.rmtree(new)


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
