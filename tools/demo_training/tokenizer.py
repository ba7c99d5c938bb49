"""The byte-level BPE vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo_training.settings import TrainingError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a vocabulary with an entry for every byte, so that it covers all texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        # The model would have unused embeddings.
        raise TrainingError(
            f"--vocab-size {vocab_size} is more than the source files yield, {tokenizer.get_vocab_size()}: "
            "choose at most that, or give more source"
        )
    return tokenizer


def as_transformers_tokenizer(tokenizer: Tokenizer, max_positions: int) -> PreTrainedTokenizerFast:
    """Return the vocabulary in the form that `AutoTokenizer` loads."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=max_positions
    )
    return cast(PreTrainedTokenizerFast, wrapped)
