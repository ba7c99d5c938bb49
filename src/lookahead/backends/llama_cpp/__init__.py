"""Runs GGUF models on token trees, through llama.cpp."""
