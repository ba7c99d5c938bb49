"""What vLLM's configuration says about drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lookahead.errors import InvalidArgumentError

LEARNS = ("logits", "tokens")


@dataclass(frozen=True)
class Settings:
    """How to draft.

    Attributes:
        learn: `"logits"`: from what the model predicts at every position that it computes; `"tokens"`: from prompts and
            sampled tokens alone.
        adaptive: Send as many drafted tokens as pay, by the clock, and none while drafting does not pay. Else as many
            as vLLM allows.
        memory: A file that the memory is read from and saved to; it lasts as long as the worker if not given.
        save_seconds: Least time between two savings of the file.
    """

    learn: str = "logits"
    adaptive: bool = True
    memory: str | None = None
    save_seconds: float = 60.0

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """What `additional_config={"lookahead": {...}}` says.

        Raises:
            InvalidArgumentError: It says something unknown, or asks for vLLM's second model runner.
        """
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise InvalidArgumentError(
                "VLLM_USE_V2_MODEL_RUNNER=1: vLLM's second model runner takes no drafts of a class; unset it or set it "
                "to 0, or leave speculative_config out"
            )
        given = vllm_config.additional_config
        given = given.get("lookahead", {}) if isinstance(given, Mapping) else {}
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise InvalidArgumentError(
                f"additional_config has lookahead={given!r}; it takes a dictionary of {', '.join(names)}"
            )
        settings = cls(**given)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.learn not in LEARNS:
            raise InvalidArgumentError(
                f"lookahead.learn={self.learn!r} is not known; choose one of {', '.join(LEARNS)}"
            )
        if not isinstance(self.adaptive, bool):
            raise InvalidArgumentError(f"lookahead.adaptive={self.adaptive!r} must be true or false")
        if self.memory is not None and not (isinstance(self.memory, str) and self.memory):
            raise InvalidArgumentError(f"lookahead.memory={self.memory!r} must be the path of a file")
        if (
            isinstance(self.save_seconds, bool)
            or not isinstance(self.save_seconds, (int, float))
            or self.save_seconds < 0
        ):
            raise InvalidArgumentError(f"lookahead.save_seconds={self.save_seconds!r} must be a number, at least 0")
        if self.memory is not None and self.learn == "tokens":
            raise InvalidArgumentError("lookahead.memory is for learn='logits'; a memory of tokens alone is not saved")
