"""GGUF models with the interface of transformers' models, run by llama.cpp."""
