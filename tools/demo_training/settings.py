"""Settings of a training: these options alone decide the weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NoReturn


class TrainingError(Exception):
    """Training cannot continue; the message names the option, its value and the remedy."""


def option(default: Any, meaning: str, *, at_least: int | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Return a field that is also an option of the command line, so that each option is defined once."""
    return dataclasses.field(default=default, metadata={"help": meaning, "at_least": at_least, "choices": choices})


def flag(name: str) -> str:
    """Return the option's spelling: `batch_tokens` is `--batch-tokens`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training. Equal settings and equal source files give equal weights.

    Raises:
        TrainingError: A value is out of range, or two values conflict.
    """

    source: tuple[str, ...] = ()
    """Folders of Python files; the running environment if empty."""
    tokens: int = option(9_700_000, "tokens to train on, rounded up to whole batches", at_least=1)
    batch_tokens: int = option(8192, "tokens in one optimizer step", at_least=1)
    sequence_length: int = option(512, "tokens the model sees at once during training", at_least=2)
    max_positions: int = option(2048, "longest text that the configuration allows later", at_least=2)
    vocab_size: int = option(4096, "entries of the byte-level BPE vocabulary", at_least=257)
    hidden_size: int = option(256, "width of the model", at_least=2)
    intermediate_size: int = option(704, "width inside the feed-forward layers", at_least=1)
    layers: int = option(6, "number of layers", at_least=1)
    heads: int = option(4, "number of attention heads", at_least=1)
    muon_lr: float = option(0.02, "learning rate of Muon, for the matrices of the layers")
    adamw_lr: float = option(0.003, "learning rate of AdamW, for everything else")
    decay_from: float = option(0.4, "share of the run after which the rates fall linearly to zero")
    max_mb_per_package: float = option(22.0, "most MB of source taken from one package")
    tokenizer_files: int = option(2500, "files that the vocabulary is trained on", at_least=1)
    validation_percent: float = option(1.0, "percent of the source held out, as whole files")
    validation_tokens: int = option(65_536, "most held-out tokens that a validation reads", at_least=1)
    seed: int = option(0, "seed of the weights, the choice of files and the data order", at_least=0)
    optimizer: str = option(
        "auto", "muon is Muon and AdamW, auto is muon if torch has it", choices=("auto", "muon", "adamw")
    )
    dtype: str = option(
        "bfloat16",
        "arithmetic of forward and backward; the weights in training are always float32",
        choices=("bfloat16", "float32"),
    )
    save_dtype: str = option("bfloat16", "type of the saved weights", choices=("bfloat16", "float32"))
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto is cuda if there is one")
    start_from: str = option("", "folder of a model whose weights and vocabulary to go on from; none starts afresh")
    own_text_weight: float = option(
        0.0, "weight of the loss on cycles in the model's own greedy text, as unlikelihood; 0 leaves it out"
    )
    own_text_rows: int = option(8, "own texts in one optimizer step", at_least=1)
    own_text_steps: int = option(
        4, "optimizer steps that a set of own texts serves, each with a part of it", at_least=1
    )
    own_text_tokens: int = option(128, "tokens of an own text", at_least=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata.get("at_least")
            if least is not None and value < least:
                self._refuse(field.name, f"must be at least {least}")
        for name in ("muon_lr", "adamw_lr", "max_mb_per_package"):
            if not getattr(self, name) > 0:
                self._refuse(name, "must be above 0")
        if not self.own_text_weight >= 0:
            self._refuse("own_text_weight", "must be at least 0")
        if not 0 < self.validation_percent < 100:
            self._refuse("validation_percent", "must lie between 0 and 100")
        if not 0 <= self.decay_from < 1:
            self._refuse("decay_from", "must be at least 0 and below 1")
        if self.batch_tokens % self.sequence_length:
            self._refuse("batch_tokens", f"must be a multiple of --sequence-length {self.sequence_length}")
        if self.hidden_size % (2 * self.heads):
            self._refuse("hidden_size", f"must be a multiple of twice --heads {self.heads}, for an even width per head")
        if self.max_positions < self.sequence_length:
            self._refuse("max_positions", f"must be at least --sequence-length {self.sequence_length}")

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise TrainingError(f"{flag(name)} {getattr(self, name)} {reason}")

    @property
    def steps(self) -> int:
        """Number of optimizer steps for all tokens."""
        return -(-self.tokens // self.batch_tokens)

    @property
    def batch_size(self) -> int:
        """Number of sequences in a step."""
        return self.batch_tokens // self.sequence_length

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dataclasses.asdict(self) | {"source": list(self.source)}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """Return differences to saved settings, each as `--name VALUE (was VALUE)`."""
        mine = self.as_dict()
        names = [name for name in mine if mine[name] != saved.get(name)]
        return [f"{flag(name)} {_shown(mine[name])} (was {_shown(saved.get(name))})" for name in names]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value) or "the running environment"
    return str(value)
