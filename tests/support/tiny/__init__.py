"""Every family of models of transformers, as small as it can be built."""
