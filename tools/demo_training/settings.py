"""Settings of a training: these options alone decide the weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


class TrainingError(Exception):
    """Training cannot continue; the message names the option, its value and the remedy."""


def flag(name: str) -> str:
    """Return the option's spelling: `batch_tokens` is `--batch-tokens`."""
    return "--" + name.replace("_", "-")


def option(default: Any, meaning: str) -> Any:
    """Return a field that is also an option of the command line."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training. Equal settings and equal source files give equal weights on a CPU.

    Raises:
        TrainingError: A value is out of range, or two values conflict.
    """

    source: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"help": "folders of Python files; each entry is a package (default: the running environment)"},
    )
    tokens: int = option(9_700_000, "tokens to train on, rounded up to whole batches")
    batch_tokens: int = option(8192, "tokens in one optimizer step")
    sequence_length: int = option(512, "tokens the model sees at once during training")
    max_positions: int = option(2048, "longest text that the configuration allows later")
    vocab_size: int = option(4096, "entries of the byte-level BPE vocabulary, at least 257")
    hidden_size: int = option(256, "width of the model")
    intermediate_size: int = option(704, "width inside the feed-forward layers")
    layers: int = option(6, "number of layers")
    heads: int = option(4, "number of attention heads")
    muon_lr: float = option(0.02, "learning rate of Muon, for the matrices of the layers")
    adamw_lr: float = option(0.003, "learning rate of AdamW, for everything else")
    decay_from: float = option(0.4, "share of the run after which the rates fall linearly to zero")
    max_mb_per_package: float = option(22.0, "largest number of MB of source from one package")
    tokenizer_files: int = option(2500, "files that the vocabulary is trained on")
    validation_percent: float = option(1.0, "percent of the source held out, as whole files")
    validation_tokens: int = option(65_536, "largest number of held-out tokens of a validation")
    seed: int = option(0, "seed of the weights, the choice of files and the data order")
    optimizer: Literal["muon", "adamw"] = option("muon", "muon: Muon and AdamW; adamw: AdamW alone")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic in training; the weights are float32")
    save_dtype: Literal["bfloat16", "float32"] = option("bfloat16", "type of the saved weights")
    device: Literal["auto", "cpu"] = option("auto", "auto is a GPU if there is one")
    start_from: str = option("", "folder of a model with the weights and the vocabulary to begin with")
    own_text_weight: float = option(0.0, "weight of the loss on cycles in the model's own greedy text")
    own_text_rows: int = option(8, "own texts in one optimizer step")
    own_text_steps: int = option(4, "optimizer steps that share a set of own texts")
    own_text_tokens: int = option(128, "tokens of an own text")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and name != "seed" and value < 1:
                self._refuse(name, "must be at least 1")
        for name, is_valid, rule in (
            ("muon_lr", self.muon_lr > 0, "must be above 0"),
            ("adamw_lr", self.adamw_lr > 0, "must be above 0"),
            ("own_text_weight", self.own_text_weight >= 0, "must be at least 0"),
            ("validation_percent", 0 < self.validation_percent < 100, "must lie between 0 and 100"),
            ("decay_from", 0 <= self.decay_from < 1, "must be at least 0 and below 1"),
            ("vocab_size", self.vocab_size >= 257, "must be at least 257"),
            (
                *("batch_tokens", self.batch_tokens % self.sequence_length == 0),
                f"must be a multiple of --sequence-length {self.sequence_length}",
            ),
            (
                *("hidden_size", self.hidden_size % (2 * self.heads) == 0),
                f"must be a multiple of twice --heads {self.heads}, for an even width per head",
            ),
            (
                *("max_positions", self.max_positions >= self.sequence_length),
                f"must be at least --sequence-length {self.sequence_length}",
            ),
        ):
            if not is_valid:
                self._refuse(name, rule)

    def _refuse(self, name: str, reason: str) -> None:
        raise TrainingError(f"{flag(name)} {getattr(self, name)} {reason}")

    @property
    def steps(self) -> int:
        """Number of optimizer steps for all tokens."""
        return -(-self.tokens // self.batch_tokens)
