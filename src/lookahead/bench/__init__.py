"""Benchmarks: methods on tasks on models, from one small file. `lookahead bench` is the way in."""
