"""The decoding step, for any model: numpy alone, no torch, no transformers."""
