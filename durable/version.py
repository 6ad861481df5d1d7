"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("durable-bus")
except PackageNotFoundError:  # a bare checkout
    __version__ = "0.0.0+checkout"
