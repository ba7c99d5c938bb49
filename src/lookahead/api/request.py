"""One call of `generate`, as transformers hands it over: prepared, decoded, returned."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from lookahead.api.packed_batch import PackedBatch, packed_batch
from lookahead.backends.session import open_session
from lookahead.backends.transformers import PromptPass
from lookahead.backends.transformers.model_state import (
    draft_account,
    draft_memory,
    keep_memory,
    release_memory,
)
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.config import LookaheadConfig
from lookahead.core.decoder import Batch, decode, step
from lookahead.core.draft_account import DraftAccount
from lookahead.core.statistics import OnStep, StepRecord
from lookahead.core.watching import Recorder
from lookahead.drafting import Drafter, NGramPool, build_chain_drafter, build_drafter
from lookahead.parallel.alone import Alone
from lookahead.serving.arguments import check_own_prefill
from lookahead.serving.output import LookaheadOutput, padded_texts, stack_collected, stack_texts
from lookahead.serving.prediction import Prediction, predicted_texts
from lookahead.serving.prepared import Arguments
from lookahead.serving.prompt_warm_up import warm_up_tokens
from lookahead.serving.selecting import make_sampler, row_processors
from lookahead.serving.shielding import shielded
from lookahead.serving.stopping import StopRule, last_lengths
from lookahead.serving.streaming import StreamFeeder

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


def decode_request(
    arguments: Arguments,
    *,
    config: LookaheadConfig,
    on_step: OnStep | None,
    ngram_pool: NGramPool | None,
    start: float,
    prediction: Prediction | None = None,
    parallel: ParallelGroup | None = None,
) -> torch.Tensor | LookaheadOutput:
    """What `lookahead.generate` returns, which was called at `start` by `perf_counter`, with its arguments."""
    ranks = parallel or Alone()
    model, prompts = arguments.model, arguments.prompts
    if prompts.inputs:
        check_own_prefill(model, prompts, config, arguments.config, parallel is not None)
    request = Request(arguments, ranks.drafting(config), ranks)
    request.prepare(arguments.processors, StopRule(arguments.criteria), ngram_pool, prediction)
    if ranks.rank == 0:  # which speaks for all
        request.listen(on_step, arguments.streamer, config.trace)
    else:
        request.listen(None, None, None)
    return request.run(start)


class Request:
    """The rows of one call: prepared, decoded, and returned.

    Args:
        arguments: What the call asks for.
        config: How to draft.
        ranks: Who decodes; they agree here on what they do.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    def __init__(
        self,
        arguments: Arguments,
        config: LookaheadConfig,
        ranks: ParallelGroup | Alone,
    ) -> None:
        model, prompts, generation_config = arguments.model, arguments.prompts, arguments.config
        self._temperature = arguments.temperature
        self._model = model
        self._prompts = prompts
        self._config = config
        self._generation_config = generation_config
        self._ranks = ranks
        self._call = open_session(model).begin(prompts, config, generation_config)
        ranks.check(model, self._call.runner)
        ranks.begin(model, config, generation_config, (prompts.input_ids, prompts.mask))
        alone = isinstance(ranks, Alone) and self._call.packs
        self._packed = packed_batch(arguments, config) if alone else None
        wants_cache = generation_config.return_dict_in_generate and generation_config.use_cache
        self._returns_cache = bool(wants_cache and self._call.keeps_cache)
        self._feeder: StreamFeeder | None = None

    def prepare(
        self,
        processors: LogitsProcessorList,
        rule: StopRule,
        pool: NGramPool | None,
        prediction: Prediction | None = None,
    ) -> None:
        """Make the sequences: for each row a drafter, a sampler, and where it has to end."""
        config, prompts = self._config, self._prompts
        known = self._model.get_input_embeddings().num_embeddings if prediction is not None else 0
        self._predicted = predicted_texts(prediction, config, prompts.rows, known)
        self._memory = draft_memory(self._model, config) if config.preset == "auto" else None
        account = self._account() if config.chooses_nodes and self._packed is None else None
        drafters = self._drafters(pool, account)
        ends = last_lengths(self._call.runner.last_length, prompts, rule.has_eos)
        self._noise = SamplingNoise(prompts.rows)
        self._rule = rule
        self._sequences = [
            TextSequence(
                prompts.input_ids[row : row + 1].long(),  # as the texts that transformers returns
                prompts.tokens[row],
                drafters[row],
                make_sampler(
                    row_processors(processors, row, prompts.rows), self._generation_config, self._noise.row(row)
                ),
                rule,
                ends[row],
                index=row,
                most_tokens=rule.most_tokens(prompts.width, len(prompts.tokens[row])),
            )
            for row in range(prompts.rows)
        ]
        self._batch = Batch(self._sequences, times=account, clock=self._call.clock)

    def listen(self, on_step: OnStep | None, streamer: BaseStreamer | None, trace: Recorder | None) -> None:
        """Tell `on_step` and `trace` of every step, and `streamer` of every token; and who draws, of texts that end."""
        if streamer is not None:
            self._feeder = feeder = StreamFeeder(streamer, self._prompts.rows, self._pad_token)

        def tell(record: StepRecord) -> None:
            if on_step is not None:
                on_step(record)
            if streamer is not None:
                feeder.add(record)
            if record.finished and self._rule.has_eos:
                self._noise.leave(record.index)

        for sequence in self._sequences:
            sequence.on_step = tell
            if trace is not None:
                sequence.watcher = trace.begin(sequence.tokens)

    def run(self, start: float) -> torch.Tensor | LookaheadOutput:
        """Decode all rows, and give back what `lookahead.generate`, called at `start`, returns."""
        self._batch.statistics.seconds.add("prepare", start)
        keeps_cache = self._returns_cache or self._prompts.cache is not None
        try:
            self._decode(keeps_cache)
        except Exception as error:
            self._call.restore()
            self._ranks.fail(error)
            raise
        finally:
            if self._memory is not None:
                keep_memory(self._model, self._config, self._memory)
        if self._feeder is not None:
            self._feeder.end()
        output = self._output(self._call.release(keeps_cache))
        if self._memory is not None:
            release_memory(self._model, self._config, self._memory)
        return output

    @property
    def _pad_token(self) -> int | None:
        token = self._generation_config._pad_token_tensor
        return int(token) if token is not None and self._rule.has_eos else None

    def _account(self) -> DraftAccount:
        return draft_account(self._model, self._config, self._prompts.rows, self._temperature, self._call.chains)

    def _drafters(self, pool: NGramPool | None, account: DraftAccount | None) -> list[Drafter]:
        config = shielded(self._config, self._prompts.input_ids.device)
        if pool is None and config.share_pool:
            pool = NGramPool(config.ngram_size, config.guess_set_size)
        common = None if self._packed is None else self._packed.shared
        adaptive = common is not None or (account is not None and account.adaptive)
        reads = account is None or account.reads_prompts
        read = [warm_up_tokens(self._model, len(row), adaptive) if reads else 0 for row in self._prompts.tokens]
        known = getattr(self._model.get_input_embeddings(), "num_embeddings", None)
        if self._call.chains:
            shared = (config, self._memory, account)
            rows = zip(read, self._predicted, strict=True)
            return [build_chain_drafter(*shared, tokens, known, predicted) for tokens, predicted in rows]
        most = self._call.most_nodes
        arguments = (config, pool, self._memory, account)
        return [
            build_drafter(
                *arguments,
                tokens,
                most,
                known,
                predicted=predicted,
                budget=None if common is None else common.row(self._temperature),
            )
            for tokens, predicted in zip(read, self._predicted, strict=True)
        ]

    @torch.no_grad()
    def _decode(self, keeps_cache: bool) -> None:
        if self._packed is not None:
            self._decode_packed(self._packed)
            return
        batch = self._batch
        backend = self._ranks.backend(self._call.runner, batch, self._rule.asks_others)
        if self._feeder is not None:
            self._feeder.start(self._prompts.input_ids)
        prompts, chunk_size = self._prompts, self._generation_config.prefill_chunk_size
        if prompts.inputs:
            step(PromptPass(self._call.runner, self._model, prompts.input_ids, prompts.mask, prompts.inputs), batch)
        else:
            start = perf_counter()
            batch.statistics.prefill_passes = backend.prefill(prompts.tokens, chunk_size)
            batch.statistics.seconds.add("prepare", start)
        decode(backend, batch)
        if not self._rule.has_eos:
            self._lengthen()
            decode(backend, batch)
        if keeps_cache:
            backend.complete(padded_texts(self._sequences, self._pad_token))

    def _decode_packed(self, packed: PackedBatch) -> None:
        if self._feeder is not None:
            self._feeder.start(self._prompts.input_ids)
        chunk_size, start = self._generation_config.prefill_chunk_size, perf_counter()
        self._batch.statistics.prefill_passes = packed.prefill(self._prompts.tokens, chunk_size)
        self._batch.statistics.seconds.add("prepare", start)
        packed.decode(self._batch)
        if not self._rule.has_eos:
            self._lengthen()
            packed.decode(self._batch)

    def _lengthen(self) -> None:
        """Let rows go on that ended before others: without an end-of-sequence token transformers pads nothing."""
        longest = max(sequence.length for sequence in self._sequences)
        for sequence in self._sequences:
            sequence.stop = lambda sequence: sequence.length >= longest
            sequence.most_tokens = len(sequence.tokens) + longest - sequence.length
            sequence.finished = sequence.stop(sequence)
        self._batch.times = None

    def _output(self, cache: Cache | None) -> torch.Tensor | LookaheadOutput:
        texts = stack_texts(self._sequences, self._pad_token)
        if not self._generation_config.return_dict_in_generate:
            return texts
        self._batch.statistics.state_bytes = self._call.state_bytes
        self._batch.statistics.invariant_rows = self._call.invariant_rows
        self._batch.statistics.sources = [
            sequence.ask_drafter(lambda drafter: drafter.statistics(), {}) for sequence in self._sequences
        ]
        return LookaheadOutput(
            sequences=texts,
            scores=stack_collected([sequence.sampler.scores for sequence in self._sequences]),
            logits=stack_collected([sequence.sampler.logits for sequence in self._sequences]),
            past_key_values=cache if self._returns_cache else None,
            statistics=self._batch.statistics,
        )
