"""Cases: a model and calls, to compare lookahead decoding with transformers."""
