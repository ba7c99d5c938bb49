"""The training: transformers' `Trainer` with Muon, and with a loss on the model's own loops."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from demo_training.own_text import own_text, own_text_loss
from demo_training.settings import TrainingError, TrainingSettings, flag
from demo_training.tokens import END_OF_TEXT_ID, Tokens


def initial_model(settings: TrainingSettings) -> LlamaForCausalLM:
    """Return the model that a training begins with: random, or that of `start_from`."""
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
    if not settings.start_from:
        return LlamaForCausalLM(config)
    try:
        model = LlamaForCausalLM.from_pretrained(settings.start_from, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TrainingError(f"--start-from {settings.start_from} cannot be loaded ({error})") from error
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "max_positions": "max_position_embeddings"}
    for name in ("vocab_size", "hidden_size", "intermediate_size", *names):
        field = names.get(name, name)
        wanted, found = getattr(config, field), getattr(model.config, field)
        if wanted != found:
            raise TrainingError(
                f"{flag(name)} {wanted} is not that of --start-from {settings.start_from}: give {flag(name)} {found}"
            )
    return model


class Optimizers(Optimizer):
    """Muon for the matrices inside of the layers, AdamW for the rest; with `adamw`, AdamW for everything.

    The embedding is two-dimensional too, but a table of rows, not a map between spaces. Muon's orthogonal updates only
    suit maps.
    """

    def __init__(self, model: LlamaForCausalLM, settings: TrainingSettings) -> None:
        matrices = [one for one in model.model.layers.parameters() if one.ndim == 2]
        self._parts: list[Optimizer] = []
        if settings.optimizer == "muon":
            if not hasattr(torch.optim, "Muon"):
                raise TrainingError("--optimizer muon needs torch 2.9 or later: update it, or give --optimizer adamw")
            self._parts.append(torch.optim.Muon(matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=0.0))
        inside = {id(one) for part in self._parts for group in part.param_groups for one in group["params"]}
        rest = [one for one in model.parameters() if id(one) not in inside]
        self._parts.append(AdamW(rest, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0))
        super().__init__(rest, {})
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        """See `Optimizer`."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer`."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Optimizer`."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Return the share of the full learning rate: 1, then a linear decay to 0 one step after the last."""
    return min(1.0, (1 - step / settings.steps) / (1 - settings.decay_from))


class CtrlC(TrainerCallback):  # type: ignore[misc]
    """A context in which Ctrl-C saves a checkpoint, and stops the training after the step.

    Args:
        steps: Number of steps that share a set of own texts; checkpoints are saved between sets.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._pressed = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop between two sets of own texts."""
        if self._pressed and state.global_step % self._steps == 0:
            control.should_save = control.should_training_stop = True


class DemoTrainer(Trainer):  # type: ignore[misc]
    """Trainer of windows of tokens, with a loss on cycles in own text."""

    def __init__(self, model: LlamaForCausalLM, tokens: Tokens, settings: TrainingSettings, **more: Any) -> None:
        self._settings, self._windows = settings, tokens.training
        self._own: tuple[torch.Tensor, int] | None = None
        data = {"train_dataset": _rows(tokens.training), "eval_dataset": _rows(tokens.validation)}
        optimizer = Optimizers(model, settings)
        scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
        super().__init__(model, optimizers=(optimizer, scheduler), **data, **more)

    def compute_loss(
        self, model: LlamaForCausalLM, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Return the mean loss of the windows, and in training that of own texts."""
        ids = inputs["labels"]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        if model.training and self._settings.own_text_weight:
            loss = loss + self._settings.own_text_weight * own_text_loss(model, *self._own_texts(model))
        return (loss, {}) if return_outputs else loss

    def _own_texts(self, model: LlamaForCausalLM) -> tuple[torch.Tensor, int]:
        """Return this step's part of the own texts, and the length of their prompts."""
        settings = self._settings
        number, turn = divmod(self.state.global_step, settings.own_text_steps)
        if turn == 0 or self._own is None:
            random = np.random.default_rng((settings.seed, number))
            rows = random.integers(0, len(self._windows), settings.own_text_rows * settings.own_text_steps)
            windows = torch.from_numpy(self._windows[rows, :-1].astype(np.int64)).to(model.device)
            self._own = own_text(model, windows, settings.own_text_tokens, random)
        text, prompt_length = self._own
        return text[turn :: settings.own_text_steps], prompt_length


def _rows(windows: NDArray[Any]) -> Any:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, row: int) -> dict[str, NDArray[np.int64]]:
            return {"labels": windows[row].astype(np.int64)}

    return Rows()


def run_trainer(
    model: LlamaForCausalLM, tokens: Tokens, settings: TrainingSettings, folder: Path, checkpoint_steps: int
) -> DemoTrainer:
    """Train until the last step or Ctrl-C; continue the last checkpoint in `folder`, if any."""
    between = settings.own_text_steps if settings.own_text_weight else 1
    size = settings.batch_tokens // settings.sequence_length
    every = max(settings.steps // 10, 1)
    arguments = TrainingArguments(
        str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        max_grad_norm=1.0,
        bf16=settings.dtype == "bfloat16",
        use_cpu=settings.device == "cpu",
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_steps=between * max(1, checkpoint_steps // between),
        save_total_limit=2,
        report_to="none",
        remove_unused_columns=False,
        prediction_loss_only=True,
    )
    with CtrlC(between) as ctrl_c:
        trainer = DemoTrainer(model, tokens, settings, args=arguments, callbacks=[ctrl_c])
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return trainer
