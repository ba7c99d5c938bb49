"""Version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lookahead-decoding")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"
