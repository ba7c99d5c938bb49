"""Benchmarks of methods on tasks and models, described by one file; run by `lookahead bench`."""
