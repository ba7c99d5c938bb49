"""Models of transformers, run as they are on token trees or chains."""
