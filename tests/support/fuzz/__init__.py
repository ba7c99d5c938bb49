"""A differential fuzzer: lookahead decoding against transformers' own `generate`, on every family of models."""
