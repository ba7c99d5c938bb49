"""The proposer that vLLM asks for drafts after each of its steps: its settings, what it reads of the target model, and
how it learns and drafts."""

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
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step_costs import StepCosts
from lookahead.core.step_time import StepTime
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import SHOWN, Step
from lookahead.drafting.auto.search import WANTED
from lookahead.drafting.memory_file import MemoryFile
from lookahead.drafting.warm_up import compile_loops
from lookahead.errors import InvalidArgumentError, LookaheadWarning
from lookahead.integrations.vllm.requests import Requests, Rows

_ORDERS = 8
"""Longest context of the memory. Other texts are searched by it alone, so it is twice that of a single text."""

_MOST_CALLS = 4
"""Calls of one step that are read: the one before sampling, and those for log-probabilities of a prompt."""

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
        return cls(**given)

    def __post_init__(self) -> None:
        number = isinstance(self.save_seconds, (int, float)) and not isinstance(self.save_seconds, bool)
        checks = {
            "learn": (self.learn in LEARNS, f"one of {', '.join(LEARNS)}"),
            "adaptive": (isinstance(self.adaptive, bool), "true or false"),
            "memory": (self.memory is None or (isinstance(self.memory, str) and self.memory), "the path of a file"),
            "save_seconds": (number and self.save_seconds >= 0, "a number, at least 0"),
        }
        for name, (holds, meaning) in checks.items():
            if not holds:
                raise InvalidArgumentError(f"lookahead.{name}={getattr(self, name)!r} must be {meaning}")
        if self.memory is not None and self.learn == "tokens":
            raise InvalidArgumentError("lookahead.memory is for learn='logits'; a memory of tokens alone is not saved")


class TargetPredictions:
    """Reads along when a model computes logits.

    vLLM gives proposers the target model, and no logits. So the method `compute_logits` of this one object, not of
    its class, is called through here. The likeliest tokens are listed before vLLM sees the logits: processors, grammars
    and temperatures change them in place.

    Args:
        vocabulary: How many tokens it knows; logits may have more columns.
        top_k: How many tokens are listed for each row.
        most_rows: Most rows that a step can have; larger calls are about something else.
    """

    def __init__(self, model: Any, vocabulary: int, top_k: int, most_rows: int) -> None:
        self._vocabulary = vocabulary
        self._top_k = top_k
        self._most_rows = most_rows
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rests = False
        model.compute_logits = partial(self._read, model.compute_logits)

    def expect(self, reads: bool) -> None:
        """Forget what was said, and read the step that follows, or do not."""
        self._calls = []
        self._rests = not reads

    def _read(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        reads = not self._rests and len(self._calls) < _MOST_CALLS
        # With several ranks only one of them may have logits.
        if reads and isinstance(logits, torch.Tensor) and 0 < logits.shape[0] <= self._most_rows:
            self._calls.append(top_predictions(logits.detach()[:, : self._vocabulary], self._top_k))
        return logits

    def take(self, rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """What was said since the last time, if it was about so many rows: the likeliest tokens of each, likeliest
        first, and their probabilities, `[rows, top_k]`. The first call about as many is the one before sampling."""
        for ids, probabilities in self._calls:
            if len(ids) == rows:
                return ids.cpu().numpy(), probabilities.float().cpu().numpy()
        return None


@dataclass
class ProposerStatistics:
    """What was drafted since the worker was started.

    Attributes:
        steps: Steps of vLLM after which drafts were asked for.
        requests: Requests that were begun.
        drafted: Tokens drafted.
        accepted: How many of them were accepted.
        unread: Steps whose logits were to be read, of which there were none, or not as many rows as the drafts have.
    """

    steps: int = 0
    requests: int = 0
    drafted: int = 0
    accepted: int = 0
    unread: int = 0


class LookaheadProposer:
    """Drafts for vLLM: `speculative_config={"method": "custom_class", "model":
    "lookahead.integrations.vllm.LookaheadProposer", "num_speculative_tokens": k}`.

    Drafts change the number of steps; which tokens are kept, vLLM decides. Every worker has a memory of its own.

    vLLM names no requests. They are recognised by their texts, which are compared as a whole: one that was
    preempted and comes back goes on from where it was, and one that is new, aborted or in another place of the batch
    disturbs no other.

    Args:
        vllm_config: vLLM's configuration; `Settings` says what is read of `additional_config`.

    Attributes:
        statistics: Counts since the worker was started.

    Raises:
        InvalidArgumentError: It has settings that are unknown, or a memory file that is none.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._settings = Settings.of(vllm_config)
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
        self._began: float | None = None  # when the last step was over
        self._saved = monotonic()
        self.statistics = ProposerStatistics()
        if self._file is not None:
            weakref.finalize(self, _save, self._file, self._model)  # when the process ends, if not before
        compile_loops()

    def load_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM with the target model, whose logits are read along."""
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
        """Learn from the step that is over, and draft for the one that follows.

        Args:
            sampled_token_ids: For each request of the batch the tokens that the step added: the accepted part of its
                draft, and one more. None for a request of whose prompt a part is still to come.
            num_tokens_no_spec: Tokens of each text, those included, `[at least requests]`.
            token_ids_cpu: The texts, `[at least requests, at least as many tokens]`.

        Returns:
            A draft for each request of the batch, at most `num_speculative_tokens` tokens; may be empty.
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
        counts = np.where(places < 0, 0, self._batch.state.counts[places])
        drafts = self._batch.state.trees["token"][places, 1:].tolist()
        return [draft[:count] for draft, count in zip(drafts, counts.tolist(), strict=True)]

    def _book(self, rows: Rows, lengths: NDArray[np.int64], added: NDArray[np.int64], now: float) -> None:
        """Note what the step took, if it was about the requests of the one before and no prompt."""
        if self._pace is None or self._began is None or not len(added) or not rows.verified.all():
            return
        nodes, tokens = int(rows.counts.sum()), int(added.sum())
        context = int((lengths - added).max())
        self._pace.book(StepTime(nodes, context, now - self._began, tokens, len(added), not self._rests))

    def _learn(
        self, rows: Rows, tokens: NDArray[np.int32], lengths: NDArray[np.int64], added: NDArray[np.int64]
    ) -> None:
        """Let the texts go on, and learn what the step showed of them."""
        batch, counts = self._batch, rows.counts
        for row in np.flatnonzero((rows.places >= 0) & (rows.verified == 0)).tolist():  # new, or back again
            place, before = int(rows.places[row]), int(lengths[row] - added[row])
            if rows.begun[row]:
                batch.begin(place, tokens[row, :before])
            else:
                batch.extend(
                    place, tokens[row, batch.state.texts.dropped[place] + batch.state.texts.lengths[place] : before]
                )
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
        shown = np.zeros(len(added), dtype=SHOWN)
        shown["place"], shown["nodes"], shown["added"] = rows.places, counts, added
        with batch.memory.lock:
            self.statistics.accepted += batch.learn(
                Step(shown, selected, *predictions, np.empty(count, dtype=np.int64))
            )

    def _draft(self, rows: Rows) -> NDArray[np.int64]:
        """Find a draft for each request; returns the place of each, -1 where there is none."""
        batch, pace, drafting = self._batch, self._pace, np.flatnonzero(rows.places >= 0)
        if pace is not None and len(drafting):
            pace.begin_step(len(drafting))
        places = np.full_like(rows.places, -1) if self._rests else rows.places
        wanted = np.empty(len(places), dtype=WANTED)
        wanted["place"], wanted["nodes"] = places, self._most_drafted
        wanted["levels"] = self._most_tokens - batch.state.texts.dropped[places] - batch.state.texts.lengths[places] - 1
        wanted["least"] = 0.0 if pace is None else pace.least
        with batch.memory.lock:
            batch.find(wanted)
        if pace is not None and not self._rests:
            found = rows.places[drafting]
            offers = [batch.state.trees["probability"][place, 1 : 1 + batch.state.counts[place]] for place in found]
            learned = 0 if self._target is None else len(found)
            counts = batch.state.counts[found]
            batch.state.counts[found] = pace.share(np.concatenate(offers), counts, len(found), learned)
        self.statistics.steps += 1
        self.statistics.drafted += int(np.maximum(batch.state.counts[places[places >= 0]], 0).sum())
        return places

    @property
    def _rests(self) -> bool:
        """Whether the coming step goes without drafts; before they are made, the step that is over."""
        return self._pace is not None and self._pace.backs_off

    def _save_sometimes(self) -> None:
        """Save the memory when requests have ended, but not too often."""
        if self._file is None or not self._requests.have_left:
            return
        if monotonic() >= self._saved + self._settings.save_seconds:
            _save(self._file, self._model)
            self._saved = monotonic()


def _new_memory() -> DraftMemory:
    return DraftMemory(_ORDERS)


def _save(file: MemoryFile, model: str) -> None:
    """Save a memory; where that fails the file stays as it was, and drafting goes on."""
    try:
        file.save(model)
    except (OSError, InvalidArgumentError) as error:
        warnings.warn(f"what drafts learned was not saved: {error}", LookaheadWarning, stacklevel=2)
