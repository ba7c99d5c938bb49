"""Cases: a model and calls with it, made by lookahead decoding and by transformers, and compared."""
