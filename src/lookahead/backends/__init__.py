"""Who runs token trees: one package for each engine."""
