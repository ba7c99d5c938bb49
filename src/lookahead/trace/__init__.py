"""Traces of runs: the nodes of every step, their sources and the accepted path; as objects, and as a page."""

from lookahead.trace.recorder import Trace, TracedStep, TracedText

__all__ = ["Trace", "TracedStep", "TracedText"]
