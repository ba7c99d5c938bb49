"""Traces: what every step of a run sent, where it came from, and what became of it; as objects, and as a page."""

from lookahead.trace.recorder import Trace, TracedStep, TracedText

__all__ = ["Trace", "TracedStep", "TracedText"]
