"""The proposer that vLLM asks for drafts after each of its steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.step_clock import step_clock
from lookahead.drafting import text_only
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.path_drafter import PathDrafter, PathSearch
from lookahead.drafting.auto.search import SUREST
from lookahead.drafting.memory_file import MemoryFile
from lookahead.drafting.warm_up import compile_path_loops
from lookahead.errors import InvalidArgumentError, LookaheadWarning
from lookahead.integrations.vllm.chain_lengths import ChainLengths, VerifiedStep
from lookahead.integrations.vllm.predictions import TargetPredictions
from lookahead.integrations.vllm.request import DraftedRequest
from lookahead.integrations.vllm.settings import Settings

MANY = 8
"""Requests of a step that teach their memory enough for some of what they could to be left out."""


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
        self._file = None if self._settings.memory is None else MemoryFile(Path(self._settings.memory), self._model)
        self._memory: DraftMemory | None = None if self._file is None else self._file.memory
        self._target: TargetPredictions | None = None
        self._awaits = True  # whether logits of the coming step are read
        self._search: PathSearch | None = None
        self._lengths = ChainLengths() if self._settings.adaptive else None
        self._clock = step_clock(torch.device("cpu"))
        self._began: float | None = None  # when the last step was over
        self._requests: list[DraftedRequest | None] = []  # of the last step, in the order of its batch
        self._absent: list[DraftedRequest] = []  # the latest last
        self._step = 0
        self._saved = monotonic()
        self.statistics = ProposerStatistics()
        if self._file is not None:
            weakref.finalize(self, _save, self._file, self._model)  # when the process ends, if not before
        compile_path_loops()

    def load_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM with the target model, whose logits are read along."""
        reads = self._settings.learn == "logits" and callable(getattr(model, "compute_logits", None))
        if self._memory is None:
            self._memory = DraftMemory() if reads else text_only.text_memory()
        self._memory.ngrams.occupy()
        if reads:
            most_rows = self._most_requests * (1 + self._most_drafted)
            self._target = TargetPredictions(model, self._vocabulary, self._memory.ngrams.top_k, most_rows)
        if isinstance(model, torch.nn.Module):
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            self._clock = step_clock(device)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Learn from the step that is over, and draft for the one that follows.

        Args:
            sampled_token_ids: For each request of the batch the tokens that the step added: the accepted part of its
                draft, and one more. None for a request of whose prompt a part is still to come.
            num_tokens_no_spec: Tokens of each text, those included, `[at least requests]`.
            token_ids_cpu: The texts, `[at least requests, at least as many tokens]`.
            slot_mappings: Not used.

        Returns:
            A draft for each request of the batch, at most `num_speculative_tokens` tokens; may be empty.
        """
        if self._memory is None:
            self.load_model(None)
        now = self._clock()
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        requests = self._recognise(texts, sampled_token_ids)
        self._book(requests, sampled_token_ids, now)
        self._observe(requests, texts, sampled_token_ids)
        drafts = self._draft(requests, texts)
        self._expect(requests)
        self._put_away(requests)
        self._began = now
        return drafts

    def _recognise(
        self, texts: Sequence[NDArray[np.integer]], sampled: Sequence[Sequence[int]]
    ) -> list[DraftedRequest | None]:
        """Which request each row is; `None` for new ones, and where nothing was sampled."""
        befores = [text[: len(text) - len(new)] for text, new in zip(texts, sampled, strict=True)]
        found: list[DraftedRequest | None] = [None] * len(texts)
        for row, same_place in enumerate(self._requests[: len(texts)]):  # where nobody came or left, that is all
            if same_place is not None and sampled[row] and same_place.is_at(befores[row]):
                found[row] = same_place
        if all(one is not None or not new for one, new in zip(found, sampled, strict=True)):
            return found
        others = [one for one in (*self._requests, *self._absent) if one is not None and one not in found]
        others.sort(key=lambda one: len(one.text), reverse=True)
        for row, before in enumerate(befores):
            if found[row] is None and sampled[row]:
                found[row] = next((one for one in others if one.precedes(before)), None)
                others = [one for one in others if one is not found[row]]
        return found

    def _took_part(self, request: DraftedRequest | None, sampled: Sequence[int], text: NDArray[np.integer]) -> bool:
        """Whether the step verified the draft that was made for this request after the last step."""
        return request is not None and request.step == self._step and len(request.text) == len(text) - len(sampled)

    def _observe(
        self,
        requests: list[DraftedRequest | None],
        texts: Sequence[NDArray[np.integer]],
        sampled: Sequence[Sequence[int]],
    ) -> None:
        """Let each drafter learn what its request showed; new requests begin."""
        rows = list(zip(requests, sampled, texts, strict=True))
        counts = [1 + len(row[0].draft) if row[0] is not None and self._took_part(*row) else 1 for row in rows]
        told = [None] * len(rows) if self._target is None else self._target.take(counts)
        self.statistics.unread += self._target is not None and self._awaits and not any(told)
        for row, (request, new, text) in enumerate(rows):
            if not new:
                continue
            before = text[: len(text) - len(new)]
            if request is None:
                requests[row] = request = self._begin(before)
                self.statistics.requests += 1
            elif not self._took_part(request, new, text):
                request.catch_up(before)
            self.statistics.accepted += request.observe(new, told[row], self._target is not None)
        if self._search is not None:
            self._search.write()

    def _draft(
        self, requests: Sequence[DraftedRequest | None], texts: Sequence[NDArray[np.integer]]
    ) -> list[list[int]]:
        """A draft for each request."""
        served = [(request, text) for request, text in zip(requests, texts, strict=True) if request is not None]
        if self._lengths is not None:
            self._lengths.begin(len(served))
        self._step += 1
        least = 0.0 if self._lengths is None else self._lengths.least
        for request, text in served:
            request.step = self._step
            if self._rests:
                request.rest(text)
                continue
            room = min(self._most_drafted, self._most_tokens - len(text) - 1)
            request.propose(text, room, least, len(served) >= MANY)
        drafts = [[] if request is None else request.draft for request in requests]
        self.statistics.steps += 1
        self.statistics.drafted += sum(map(len, drafts))
        return drafts

    def _expect(self, requests: Sequence[DraftedRequest | None]) -> None:
        """Say what there is to read of the coming step."""
        if self._target is None:
            return
        parts = [
            (1, not self._rests) if request is None else (1 + len(request.draft), not (self._rests or request.is_sure))
            for request in requests
        ]
        self._target.expect(parts)
        self._awaits = not parts or any(read for _, read in parts)

    @property
    def _rests(self) -> bool:
        """Whether the coming step goes without drafts."""
        return self._lengths is not None and self._lengths.rests

    def _begin(self, text: NDArray[np.integer]) -> DraftedRequest:
        """A new request."""
        if self._search is None:
            assert self._memory is not None
            surest = SUREST if self._target is not None else text_only.SUREST
            self._search = PathSearch(self._memory, self._most_drafted, surest)
        return DraftedRequest(PathDrafter(self._search), text)

    def _book(self, requests: Sequence[DraftedRequest | None], sampled: Sequence[Sequence[int]], now: float) -> None:
        """Note what the step took, if it was about the requests of the one before and no prompt."""
        present = [request for request in requests if request is not None and request.step == self._step]
        if self._lengths is None or self._began is None or not present or len(present) < len(requests):
            return
        sent, tokens = sum(len(request.draft) for request in present), sum(map(len, sampled))
        expected = sum(request.expected for request in present)
        self._lengths.book(VerifiedStep(len(present), sent, expected, tokens, now - self._began))

    def _put_away(self, requests: list[DraftedRequest | None]) -> None:
        """Keep those that are not in the batch for a while: a preempted request comes back, a finished one does not."""
        present = [request for request in requests if request is not None]
        gone = [one for one in self._requests if one is not None and one not in present]
        absent = [*(one for one in self._absent if one not in present), *gone]
        room = max(self._most_requests - len(present), 0)
        self._absent = absent[max(len(absent) - room, 0) :]
        self._requests = requests
        if gone and self._file is not None and monotonic() >= self._saved + self._settings.save_seconds:
            _save(self._file, self._model)
            self._saved = monotonic()


def _save(file: MemoryFile, model: str) -> None:
    """Save a memory; where that fails the file stays as it was, and drafting goes on."""
    try:
        file.save(model)
    except (OSError, InvalidArgumentError) as error:
        warnings.warn(f"what drafts learned was not saved: {error}", LookaheadWarning, stacklevel=2)
