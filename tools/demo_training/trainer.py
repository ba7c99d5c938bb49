"""The training loop."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo_training.optimizers import build_optimizers, learning_rate_factor, set_learning_rates
from demo_training.own_text import in_repeated_cycle, own_text, own_text_loss
from demo_training.settings import TrainingError, TrainingSettings, flag
from demo_training.token_data import TokenData
from demo_training.tokenizer import END_OF_TEXT_ID

RECENT_STEPS = 50
"""Number of steps in the reported mean loss; the loss of a single batch is noisy."""


@dataclass
class TrainingRun:
    """The state of a training, which checkpoints store."""

    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    losses: list[float] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    own_texts: tuple[torch.Tensor, int] | None = None
    """The model's latest set of own texts, and the length of its prompts."""

    @property
    def step(self) -> int:
        """Number of steps so far."""
        return len(self.losses)

    @property
    def recent_loss(self) -> float:
        """Mean loss of the last `RECENT_STEPS` steps."""
        return sum(self.losses[-RECENT_STEPS:]) / len(self.losses[-RECENT_STEPS:])


def choose_device(name: str) -> torch.device:
    """Return the device `name`, and try it now, before the data is prepared."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(f"--device {name} cannot be used here ({reason}): try --device cpu") from error
    return device


class StopRequest:
    """Delay Ctrl-C and SIGTERM to the end of a step, as half a step cannot be resumed exactly."""

    def __init__(self) -> None:
        self.made = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._make)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _make(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        # Not print, as a handler may interrupt another write to the same stream.
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once, without a checkpoint\n")
        # A second Ctrl-C ends the process at once.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def start_run(settings: TrainingSettings, device: torch.device) -> TrainingRun:
    """Start with the weights of `start_from`, or with random ones."""
    model = _loaded(settings) if settings.start_from else _drawn(settings)
    model = model.float().to(device)
    return TrainingRun(model=model, optimizers=build_optimizers(model, settings))


def _loaded(settings: TrainingSettings) -> LlamaForCausalLM:
    try:
        model = LlamaForCausalLM.from_pretrained(settings.start_from, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"--start-from {settings.start_from} holds no model that can be loaded ({error}): give the folder "
            "of a model that this tool has written"
        ) from error
    config = model.config
    for name, there in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("layers", config.num_hidden_layers),
        ("heads", config.num_attention_heads),
        ("max_positions", config.max_position_embeddings),
    ):
        # The record names these settings, so they must match the model.
        if getattr(settings, name) != there:
            raise TrainingError(
                f"{flag(name)} {getattr(settings, name)} is not that of --start-from {settings.start_from}: "
                f"give {flag(name)} {there}"
            )
    return model


def _drawn(settings: TrainingSettings) -> LlamaForCausalLM:
    # Drawn on the CPU, so that weights are equal for every device.
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )
    return LlamaForCausalLM(config)


def train(
    run: TrainingRun,
    data: TokenData,
    settings: TrainingSettings,
    progress: Progress,
    save: Callable[[], None],
    save_seconds: float,
) -> bool:
    """Train until the last step or a stop request; return whether the run is finished.

    `save` is called about every `save_seconds`, and before a stop.
    """
    # Ten validations per run, but fewer in a short one, so that training takes most of the time.
    validate_every = max(settings.steps // 10, 4 * -(-settings.validation_tokens // settings.batch_tokens))
    task = progress.add_task("training", total=settings.steps, completed=run.step, loss="…", rate="…")
    last_save = time.monotonic()
    with StopRequest() as stop:
        while run.step < settings.steps:
            began = time.monotonic()
            loss = train_step(run, data, settings)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss became {loss} in step {run.step + 1}: choose a lower --muon-lr (now "
                    f"{settings.muon_lr}) or --adamw-lr (now {settings.adamw_lr})"
                )
            run.losses.append(loss)
            rate = settings.batch_tokens / (time.monotonic() - began)
            if run.step % validate_every == 0 or run.step == settings.steps:
                _validate(run, data, settings, progress)
            run.seconds += time.monotonic() - began
            progress.update(task, completed=run.step, loss=f"{run.recent_loss:.3f}", rate=f"{rate:,.0f}")
            if stop.made or time.monotonic() - last_save >= save_seconds:
                save()
                last_save = time.monotonic()
            if stop.made:
                break
    return run.step == settings.steps


def train_step(run: TrainingRun, data: TokenData, settings: TrainingSettings) -> float:
    """Run one optimizer step; return the loss before it."""
    set_learning_rates(run.optimizers, learning_rate_factor(run.step, settings))
    loss = _loss(run.model, data.batch(run.step), settings)
    loss.backward()  # type: ignore[no-untyped-call]
    if settings.own_text_weight:
        weighted = settings.own_text_weight * own_text_loss(run.model, *_own_texts(run, data, settings), settings)
        weighted.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _own_texts(run: TrainingRun, data: TokenData, settings: TrainingSettings) -> tuple[torch.Tensor, int]:
    """Return this step's part of the own texts, and the length of their prompts."""
    number, turn = divmod(run.step, settings.own_text_steps)
    if turn == 0 or run.own_texts is None:
        windows = torch.from_numpy(data.own_text_windows(number)).to(run.model.device)
        run.own_texts = own_text(run.model, windows, settings.own_text_tokens, (settings.seed, number))
    text, prompt_length = run.own_texts
    return text[turn :: settings.own_text_steps], prompt_length


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, data: TokenData, settings: TrainingSettings) -> float:
    """Return the mean loss per held-out token."""
    total, windows = 0.0, 0
    for batch in data.validation_batches():
        total += _loss(model, batch, settings).item() * len(batch)
        windows += len(batch)
    return total / windows


def own_text_cycle_share(model: LlamaForCausalLM, data: TokenData, settings: TrainingSettings) -> float:
    """Return the share of repeated cycles in the model's own text after held-out prompts."""
    batch = next(data.validation_batches())
    windows = torch.from_numpy(batch[:, :-1]).to(model.device)
    text, prompt_length = own_text(model, windows, settings.own_text_tokens, (settings.seed,))
    return in_repeated_cycle(text)[:, prompt_length:].float().mean().item()


def _loss(model: LlamaForCausalLM, batch: npt.NDArray[np.int64], settings: TrainingSettings) -> torch.Tensor:
    device = model.device
    tokens = torch.from_numpy(batch).to(device)  # [B, S + 1]
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [B, S, V]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _validate(run: TrainingRun, data: TokenData, settings: TrainingSettings, progress: Progress) -> None:
    held_out = validation_loss(run.model, data, settings)
    entry: dict[str, Any] = {
        "step": run.step,
        "tokens": run.step * settings.batch_tokens,
        "train_loss": round(run.recent_loss, 4),
        "validation_loss": round(held_out, 4),
    }
    line = f"step {run.step}/{settings.steps}: loss {run.recent_loss:.3f}, held-out loss {held_out:.3f}"
    if settings.own_text_weight:
        entry["own_text_cycle_share"] = round(own_text_cycle_share(run.model, data, settings), 4)
        line += f", {entry['own_text_cycle_share']:.0%} of its own text in cycles"
    run.validations.append(entry)
    progress.console.print(line)
