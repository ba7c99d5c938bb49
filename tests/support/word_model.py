"""A tiny, fast model with a tokenizer of forty words, saved in a folder for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(40)]


def save_word_model(folder: Path, **settings: Any) -> None:
    """Save a Llama with fixed random weights; `settings` are arguments of its configuration."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_word_tokenizer(folder, WORDS)


def save_word_tokenizer(folder: Path, words: list[str]) -> None:
    """Save a tokenizer that splits at spaces; the id of a word is its index in `words`."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
