"""Many requests on one model: they come and go, and share forward passes."""

from lookahead.serving.engine import Engine
from lookahead.serving.handle import EngineLoad, EngineStatistics, RequestHandle, RequestStatistics, TokenEvent

__all__ = ["Engine", "EngineLoad", "EngineStatistics", "RequestHandle", "RequestStatistics", "TokenEvent"]
