"""One spelling of each place, however it is named: a folder is a path, and a place of a store a URL.

    lake, ./lake/, file:///data/lake, FILE://localhost/data//lake      /data/lake
    link/../lake                                                       lake beside the folder that the link leads to
    s3a://bucket/x/../lake/, S3://bucket//lake                         s3://bucket/lake

Two spellings that the libraries read as one place would be two lakes for durable, and one that they read as another
place is refused. The names that links and mounts give to a folder stay as they are, but for those before `..`: the
system goes up from where a link leads to, and Spark from the link.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from os.path import realpath
from pathlib import Path
from typing import Final
from unicodedata import category
from urllib.parse import unquote, urlsplit

from durable.errors import InvalidSetting

_FILE: Final = re.compile(r"file:/", re.IGNORECASE)
_ONE_SLASH: Final = re.compile(r"^file:/(?!/)", re.IGNORECASE)
_STORE: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)(.*)", re.IGNORECASE)
_SCHEMES: Final[Mapping[str, str]] = {"s3a": "s3", "abfs": "abfss", "adl": "az", "azure": "az"}
_CUT: Final = re.compile(r"[?#]")
_ALTERED: Final = re.compile(r"[%\\?#]")
_THIS_MACHINE: Final = ("", "localhost")


def spelled(named: str) -> str:
    """Return the one spelling of this place. Raises InvalidSetting for one that is read as another one."""
    if any(category(character) == "Cc" for character in named):
        raise InvalidSetting(
            f"lake {named!r}: has a line break, a tab or another control character; choose another name"
        )
    if _FILE.match(named):
        return _path(_path_of_url(named))
    if found := _STORE.fullmatch(named):
        return _url(*found.groups())
    return _path(named)


def absolute(place: str) -> str:
    """Return a place of files other than a lake: a path from the root, as of a folder of a lake; a URL as it is."""
    place = _ONE_SLASH.sub("file:///", place)
    return place if not place or "://" in place else _from_root(place)


def _from_root(path: str) -> str:
    """Return the path without `..`, which the system, Spark and deltalake read as one."""
    begun = re.sub("^//+", "/", str(Path(path).absolute()))
    before, up, below = f"{begun}/".rpartition("/../")
    return str(Path(realpath(f"{before}/.."), below)) if up else begun


def _path_of_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc.lower() not in _THIS_MACHINE:
        raise InvalidSetting(f"lake {url}: is a folder of another machine; name one of this machine by its path")
    if _CUT.search(url):
        raise InvalidSetting(f"lake {url}: a URL is cut at ? and #; give the path of the folder")
    return unquote(parts.path)


def _path(named: str) -> str:
    path = _from_root(named)
    if unquote(path) != path or "\\" in path:
        raise InvalidSetting(
            f"lake {path}: a path with per cent signs or backslashes is read as another one; choose another"
        )
    return path


def _url(scheme: str, bucket: str, path: str) -> str:
    scheme = _SCHEMES.get(scheme.lower(), scheme.lower())
    if not bucket or _ALTERED.search(path):
        fault = "is read as another one where it has per cent signs, backslashes, ? or #" if bucket else "has no bucket"
        raise InvalidSetting(f"lake {scheme}://{bucket}{path}: {fault}; give the plain URL of a place in the store")
    place = posixpath.normpath("/" + path.lstrip("/")).rstrip("/")
    return f"{scheme}://{bucket}{place}"
