"""Engine for many requests on one model, which share forward passes."""

from lookahead.serving.engine import Engine
from lookahead.serving.handle import EngineLoad, EngineStatistics, RequestHandle, RequestStatistics, TokenEvent

__all__ = ["Engine", "EngineLoad", "EngineStatistics", "RequestHandle", "RequestStatistics", "TokenEvent"]
