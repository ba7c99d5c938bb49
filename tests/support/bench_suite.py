"""A tiny benchmark for tests: a random model with a vocabulary of forty words, two prompts, all kinds of methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from word_model import save_word_model

PROMPTS = [
    {"id": "p/0", "task": "words", "prompt": "w1 w2 w3 w4 w1 w2"},
    {"id": "p/1", "task": "words", "turns": ["w9 w8 w7 w9 w8", "a second turn, not used"]},
]
NEW_TOKENS = 12
MODEL = '[[models]]\nname = "tiny"\npath = "tiny"\n'
TASK = f'[[tasks]]\nname = "words"\ndata = "words.jsonl"\nmax_new_tokens = {NEW_TOKENS}\n'
SAMPLED = TASK.replace('"words"', '"drawn"') + "sampling = { temperature = 0.8, seed = 3 }\n"
PLAIN = '[[methods]]\nname = "plain"\ntransformers = {}\n'
ENGINE = '[[methods]]\nname = "engine"\nlookahead = { preset = "autoregressive" }\n'
AUTO = '[[methods]]\nname = "auto"\nlookahead = { preset = "auto" }\n'
KEPT = '[[methods]]\nname = "kept"\nlookahead = { preset = "auto", step_budget = 8, memory = "process" }\n'
LOOKUP = '[[methods]]\nname = "lookup"\ntransformers = { prompt_lookup_num_tokens = 4 }\n'
OTHERS = """
[[methods]]
name = "assisted"
transformers = {}
assistant = "tiny"

[[methods]]
name = "jacobi"
lookahead = { preset = "jacobi", block_size = 4 }

[[methods]]
name = "paper"
lookahead = { preset = "paper", window_size = 3, ngram_size = 3, guess_set_size = 3 }

[[methods]]
name = "recycling"
lookahead = { preset = "token_recycling", step_budget = 8 }

[[methods]]
name = "matches"
lookahead = { preset = "context_matches", step_budget = 8 }
"""


def make_model(folder: Path) -> None:
    """Save a random model with a tokenizer of forty words; its texts neither end early nor repeat one word."""
    save_word_model(folder, max_position_embeddings=64, initializer_range=0.5)


def write_prompts(folder: Path, prompts: list[dict[str, Any]] = PROMPTS) -> None:
    """Write the tasks' file of prompts."""
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
