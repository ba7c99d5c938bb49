"""An OpenAI-compatible server on an engine."""
