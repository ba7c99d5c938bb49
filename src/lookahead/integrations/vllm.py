"""Drafts for vLLM, through its `custom_class` proposers. This module does not import vLLM."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.forward_result import top_predictions
from lookahead.backends.machine import step_clock
from lookahead.core.pace import Pace
from lookahead.core.ranking import UNRANKED
from lookahead.core.roots import Roots
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step_costs import StepCosts
from lookahead.core.step_time import StepTime
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import OUTCOME, Step
from lookahead.drafting.auto.search import LIMITS
from lookahead.drafting.background import compile_loops
from lookahead.drafting.memory_file import MemoryFile
from lookahead.errors import InvalidArgumentError, LookaheadWarning
from lookahead.integrations.vllm_requests import Requests, Rows
from lookahead.values import require

_ORDERS = 8
"""Longest context of the memory, in tokens. Only the memory searches other texts, so it is twice that of one text."""

LEARNS = ("logits", "tokens")


@dataclass(frozen=True)
class ProposerSettings:
    """Drafting options of the proposer.

    Attributes:
        learn: `"logits"`: learn from the model's predictions at every computed position; `"tokens"`: only from prompts
            and sampled tokens.
        adaptive: Choose the number of drafted tokens by measured times, none while drafts lose time. `False` sends
            the most that vLLM allows.
        memory: File to read the memory from and save it to; without a file the memory ends with the worker.
        save_seconds: Least seconds between two saves of the file.
    """

    learn: str = "logits"
    adaptive: bool = True
    memory: str | None = None
    save_seconds: float = 60.0

    @classmethod
    def of(cls, vllm_config: Any) -> ProposerSettings:
        """Read the settings from `additional_config={"lookahead": {...}}`.

        Raises:
            InvalidArgumentError: A setting is unknown or invalid, or vLLM's second model runner is chosen.
        """
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise InvalidArgumentError(
                "VLLM_USE_V2_MODEL_RUNNER=1: vLLM's second model runner does not accept drafts of a class; unset it or "
                "set it to 0, or leave speculative_config out"
            )
        values = vllm_config.additional_config
        values = values.get("lookahead", {}) if isinstance(values, Mapping) else {}
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or not set(values) <= set(names):
            raise InvalidArgumentError(
                f"additional_config has lookahead={values!r}; it takes a dictionary of {', '.join(names)}"
            )
        return cls(**values)

    def __post_init__(self) -> None:
        number = isinstance(self.save_seconds, (int, float)) and not isinstance(self.save_seconds, bool)
        checks = {
            "learn": (self.learn in LEARNS, f"one of {', '.join(LEARNS)}"),
            "adaptive": (isinstance(self.adaptive, bool), "true or false"),
            "memory": (self.memory is None or (isinstance(self.memory, str) and self.memory), "the path of a file"),
            "save_seconds": (number and self.save_seconds >= 0, "a number, at least 0"),
        }
        for name, (holds, meaning) in checks.items():
            require(bool(holds), f"lookahead.{name}", getattr(self, name), f"must be {meaning}")
        if self.memory is not None and self.learn == "tokens":
            raise InvalidArgumentError("lookahead.memory needs learn='logits'; a memory of tokens cannot be saved")


class TargetPredictions:
    """Record the likeliest tokens whenever a model computes logits.

    vLLM passes the target model to proposers, but no logits. So `compute_logits` of this one object, not of its class,
    is wrapped here. The likeliest tokens are read before vLLM sees the logits: processors, grammars and temperatures
    change them in place.

    Args:
        model: The target model.
        vocabulary: Number of tokens; logits may have more columns.
        top_k: Number of tokens recorded for each row.
        most_rows: Most rows of a step; larger calls have another purpose and are not read.
    """

    def __init__(self, model: Any, vocabulary: int, top_k: int, most_rows: int) -> None:
        self._vocabulary = vocabulary
        self._top_k = top_k
        self._most_rows = most_rows
        self._calls: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of rows, the first call of each
        self._rests = False
        model.compute_logits = partial(self._read, model.compute_logits)

    def expect(self, reads: bool) -> None:
        """Discard recorded predictions; read the next step if `reads`."""
        self._calls = {}
        self._rests = not reads

    def _read(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        # With several ranks only one of them may have logits.
        rows = 0 if self._rests or not isinstance(logits, torch.Tensor) else len(logits)
        if 0 < rows <= self._most_rows and rows not in self._calls:
            self._calls[rows] = top_predictions(logits.detach()[:, : self._vocabulary], self._top_k)
        return logits

    def take(self, rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Return the recorded predictions of the step, from its first call with `rows` rows, the one before sampling.

        Returns:
            Likeliest tokens, likeliest first, `[rows, top_k]` int64, and their probabilities, `[rows, top_k]` float32;
            `None` if no call had that number of rows.
        """
        if rows not in self._calls:
            return None
        ids, probabilities = self._calls[rows]
        return ids.cpu().numpy(), probabilities.float().cpu().numpy()


@dataclass
class ProposerStatistics:
    """Counts since the worker started.

    Attributes:
        steps: Steps of vLLM, each followed by a request for drafts.
        requests: Started requests.
        drafted: Drafted tokens.
        accepted: Accepted drafted tokens.
        unread: Steps skipped in learning because logits were missing or had the wrong number of rows.
    """

    steps: int = 0
    requests: int = 0
    drafted: int = 0
    accepted: int = 0
    unread: int = 0


class LookaheadProposer:
    """Drafts for vLLM: `speculative_config={"method": "custom_class", "model":
    "lookahead.integrations.vllm.LookaheadProposer", "num_speculative_tokens": k}`.

    vLLM verifies the drafts and selects the tokens, so drafts change only the number of steps. Every worker has its own
    memory.

    vLLM does not pass ids of requests, so they are recognised by comparing their whole texts. A preempted request
    continues with its own draft state when it returns. New, aborted or moved requests do not affect others.

    Args:
        vllm_config: vLLM's configuration; `ProposerSettings` lists the keys in `additional_config`.

    Attributes:
        statistics: Counts since the worker started.

    Raises:
        InvalidArgumentError: A setting is unknown or invalid, or the memory file is no such file.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._settings = ProposerSettings.of(vllm_config)
        model = vllm_config.model_config
        self._most_drafted: int = vllm_config.speculative_config.num_speculative_tokens
        self._most_tokens: int = model.max_model_len
        self._vocabulary: int = model.get_vocab_size()
        self._most_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._model = f"{model.model}@{model.revision} in vLLM, {self._vocabulary} tokens"
        self._file = (
            None if self._settings.memory is None else MemoryFile(Path(self._settings.memory), self._model, _new_memory)
        )
        self._memory: DraftMemory | None = None if self._file is None else self._file.memory
        self._target: TargetPredictions | None = None
        self._batch: DraftBatch  # made with the memory, by `load_model`
        self._requests: Requests
        self._pace = SharedPace(lambda load, temperature: Pace(StepCosts(), load)) if self._settings.adaptive else None
        self._clock = step_clock(torch.device("cpu"))
        self._began: float | None = None  # end of the last step, by the clock
        self._saved = monotonic()
        self.statistics = ProposerStatistics()
        if self._file is not None:
            weakref.finalize(self, _save, self._file, self._model)  # at the end of the process at the latest
        compile_loops()

    def load_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Prepare the memory, and wrap the target model to read its logits. Called by vLLM."""
        reads = self._settings.learn == "logits" and callable(getattr(model, "compute_logits", None))
        if self._memory is None:
            self._memory = _new_memory() if reads else DraftMemory.of_texts()
        self._memory.fit(self._vocabulary)
        self._memory.occupy()
        self._batch = DraftBatch(self._memory, self._most_drafted, chains=True, places=self._most_requests)
        self._requests = Requests(self._batch)
        if reads:
            most_rows = self._most_requests * (1 + self._most_drafted)
            self._target = TargetPredictions(model, self._vocabulary, self._memory.top_k, most_rows)
        if isinstance(model, torch.nn.Module):
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            self._clock = step_clock(device)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,  # not used
    ) -> list[list[int]]:
        """Learn from the last step, and draft for the next one.

        Args:
            sampled_token_ids: For each request of the batch the tokens added by the step: the accepted part of its
                draft, and one more. Empty for a request with an incomplete prompt.
            num_tokens_no_spec: Number of tokens of each text, new ones included, `[at least requests]`.
            token_ids_cpu: Token ids of the texts, `[at least requests, at least the longest text]`.
            slot_mappings: Ignored.

        Returns:
            A draft for each request of the batch, 0 to `num_speculative_tokens` tokens.
        """
        now = self._clock()
        added = np.array([len(new) for new in sampled_token_ids], dtype=np.int64)
        lengths = np.asarray(num_tokens_no_spec[: len(added)], dtype=np.int64)
        tokens = np.ascontiguousarray(token_ids_cpu, dtype=np.int32)
        rows = self._requests.rows(tokens, lengths, added)
        self._book(rows, lengths, added, now)
        self._learn(rows, tokens, lengths, added)
        places = self._draft(rows)
        if self._target is not None:
            self._target.expect(not self._rests)
        self._save_sometimes()
        self._began = now
        counts = np.where(places < 0, 0, self._batch.counts[places])
        drafts = self._batch.trees["token"][places, 1:].tolist()
        return [draft[:count] for draft, count in zip(drafts, counts.tolist(), strict=True)]

    def _book(self, rows: Rows, lengths: NDArray[np.int64], added: NDArray[np.int64], now: float) -> None:
        """Record the time of the step if it had the same requests as the step before, and no prompt."""
        if self._pace is None or self._began is None or not len(added) or not rows.verified.all():
            return
        nodes = int(rows.counts.sum())
        tokens = int(added.sum())
        context = int((lengths - added).max())
        self._pace.book(StepTime(nodes, context, now - self._began, tokens, len(added), not self._rests))

    def _learn(
        self, rows: Rows, tokens: NDArray[np.int32], lengths: NDArray[np.int64], added: NDArray[np.int64]
    ) -> None:
        """Extend the texts, and learn from the selected tokens and the predictions of the step."""
        batch = self._batch
        counts = rows.counts
        for row in np.flatnonzero((rows.places >= 0) & (rows.verified == 0)).tolist():  # new or resumed requests
            place = int(rows.places[row])
            before = int(lengths[row] - added[row])
            if rows.begun[row]:
                batch.begin(place, tokens[row, :before])
            else:
                batch.extend(place, tokens[row, batch.length_of(place) : before])
        self.statistics.requests += int(np.count_nonzero(rows.begun))
        count = int(counts.sum())
        predictions = None if self._target is None else self._target.take(count)
        self.statistics.unread += self._target is not None and not self._rests and predictions is None
        if predictions is None:
            ids = np.full((count, 1), -1, dtype=np.int64)
            predictions = ids, np.zeros(ids.shape, dtype=np.float32)
        sizes = zip(lengths.tolist(), added.tolist(), strict=True)
        new = [tokens[row, length - count : length] for row, (length, count) in enumerate(sizes)]
        selected = np.concatenate(new, dtype=np.int64) if new else np.empty(0, dtype=np.int64)
        outcomes = np.zeros(len(added), dtype=OUTCOME)
        outcomes["place"], outcomes["nodes"], outcomes["added"] = rows.places, counts, added
        with batch.memory.lock:
            self.statistics.accepted += batch.learn(Step.in_order(outcomes, selected, *predictions))

    def _draft(self, rows: Rows) -> NDArray[np.int64]:
        """Find a draft for each request; return the slot of each, -1 for a request without a draft."""
        batch = self._batch
        pace = self._pace
        drafting = np.flatnonzero(rows.places >= 0)
        if pace is not None and len(drafting):
            pace.begin_step(len(drafting))
        places = np.full_like(rows.places, -1) if self._rests else rows.places
        limits = np.empty(len(places), dtype=LIMITS)
        limits["place"], limits["nodes"] = places, self._most_drafted
        limits["levels"] = self._most_tokens - batch.length_of(places) - 1
        limits["min_probability"] = 0.0 if pace is None else pace.min_probability
        with batch.memory.lock:
            batch.find(limits, ranking=UNRANKED if pace is None else pace.ranking)
        if pace is not None and len(drafting) and not self._rests:
            slots = rows.places[drafting]
            offers = [batch.trees["probability"][slot, 1 : 1 + batch.counts[slot]] for slot in slots]
            pace.begin(0 if self._target is None else len(slots))
            roots = Roots([None] * len(slots))
            batch.counts[slots] = pace.choose(np.concatenate(offers), batch.counts[slots], roots, range(len(slots)))
        self.statistics.steps += 1
        self.statistics.drafted += int(np.maximum(batch.counts[places[places >= 0]], 0).sum())
        return places

    @property
    def _rests(self) -> bool:
        """Whether the next step has no drafts. Before drafting it describes the last step."""
        return self._pace is not None and self._pace.backs_off

    def _save_sometimes(self) -> None:
        """Save the memory after requests have ended, at most once in `save_seconds`."""
        if self._file is None or not self._requests.have_left:
            return
        if monotonic() >= self._saved + self._settings.save_seconds:
            _save(self._file, self._model)
            self._saved = monotonic()


def _new_memory() -> DraftMemory:
    return DraftMemory(_ORDERS)


def _save(file: MemoryFile, model: str) -> None:
    """Save a memory; after an error the file stays unchanged, and drafting continues."""
    try:
        file.save(model)
    except (OSError, InvalidArgumentError) as error:
        warnings.warn(f"the memory of drafts was not saved: {error}", LookaheadWarning, stacklevel=2)
