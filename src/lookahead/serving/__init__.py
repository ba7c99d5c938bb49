"""Many requests on one model: they come and go, and share forward passes."""

from lookahead.serving.engine import Engine
from lookahead.serving.handle import RequestHandle, TokenEvent
from lookahead.serving.statistics import EngineLoad, EngineStatistics, RequestStatistics

__all__ = ["Engine", "EngineLoad", "EngineStatistics", "RequestHandle", "RequestStatistics", "TokenEvent"]
