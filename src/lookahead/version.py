"""The version of the package that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lookahead-decoding")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"
