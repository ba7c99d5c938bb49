"""One call of `generate`, as transformers hands it over: prepared, decoded, given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lookahead.api.arguments import check_devices, check_mode, check_model_inputs, check_prompt_ids
from lookahead.api.output import LookaheadOutput, padded_texts, stack_collected, stack_texts
from lookahead.api.processors import row_processors
from lookahead.api.prompt_warm_up import warm_up_tokens
from lookahead.api.prompts import Prompts, read_prompts
from lookahead.api.resources import Resources
from lookahead.api.stopping import StopRule, last_lengths
from lookahead.api.streaming import StreamFeeder
from lookahead.backends.transformers.model_state import draft_memory, keep_memory, neighbours, step_costs
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.config import LookaheadConfig
from lookahead.core.backend import Backend
from lookahead.core.cost_model import CostModel
from lookahead.core.decoder import Batch, OnStep, decode
from lookahead.core.statistics import StepRecord
from lookahead.drafting import Drafter, NGramPool, build_drafter

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


def decode_request(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    config: LookaheadConfig,
    on_step: OnStep | None,
    ngram_pool: NGramPool | None,
    streamer: BaseStreamer | None = None,
    parallel: ParallelGroup | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | LookaheadOutput:
    """Decode with arguments that transformers has checked and prepared, as its own decoding methods do.

    Args:
        model: The model, unwrapped.
        input_ids: The prompts, `[batch, tokens]`.
        logits_processor: All processors of the call.
        stopping_criteria: All criteria of the call.
        generation_config: The configuration of the call, special tokens turned into tensors.
        config: How to draft.
        on_step: Called with each step of each sequence.
        ngram_pool: Pool to use and fill, if the caller brought one.
        streamer: Gets the prompts and every token.
        parallel: The ranks to decode with, if there are others than this process.
        **model_kwargs: What else transformers would hand to the model.

    Returns:
        As `lookahead.generate`.
    """
    check_devices(model, model_kwargs.pop("synced_gpus", False))
    check_mode(generation_config)
    check_prompt_ids(input_ids)
    check_model_inputs(model_kwargs, generation_config.use_cache)
    prompts = read_prompts(model, input_ids, model_kwargs, generation_config)
    resources = Resources(model, prompts, config, generation_config)
    if parallel is not None:
        config = parallel.drafting(config)
        parallel.begin(model, config, generation_config, (input_ids, prompts.mask))
        if parallel.rank:
            streamer = on_step = None
    request = Request(model, prompts, resources, config, generation_config, parallel)
    request.prepare(logits_processor, stopping_criteria, ngram_pool)
    request.listen(on_step, streamer)
    return request.run()


class Request:
    """The rows of one call, what they are decoded with, and who listens.

    Args:
        model: The model.
        prompts: What the rows begin with.
        resources: What the call runs on.
        config: How to draft.
        generation_config: The configuration of the call.
        parallel: The ranks to decode with, if there are others than this process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Prompts,
        resources: Resources,
        config: LookaheadConfig,
        generation_config: GenerationConfig,
        parallel: ParallelGroup | None,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._resources = resources
        self._config = config
        self._generation_config = generation_config
        self._parallel = parallel
        self._on_step: OnStep | None = None
        self._feeder: StreamFeeder | None = None
        wants_cache = generation_config.return_dict_in_generate and generation_config.use_cache
        self._returns_cache = bool(wants_cache and resources.keeps_cache)

    def prepare(self, processors: LogitsProcessorList, criteria: StoppingCriteriaList, pool: NGramPool | None) -> None:
        """Make the sequences: for each row a drafter, a sampler, and where it has to end."""
        config, rows = self._config, self._prompts.rows
        # The rows of a batch share one generator, and which of them samples first depends on the nodes of the steps.
        # So that a seed gives the same texts again, these must not depend on the clock there.
        adaptive = config.chooses_nodes and not (self._generation_config.do_sample and rows > 1)
        self._memory = draft_memory(self._model, config) if config.preset == "auto" else None
        self._costs = step_costs(self._model, config, rows) if adaptive else None
        drafters = self._drafters(pool)
        self._rule = StopRule(criteria)
        ends = last_lengths(self._resources.runner.last_length, self._prompts, self._rule.has_eos)
        self._sequences = [
            TextSequence(
                self._prompts.input_ids[row : row + 1].long(),  # as the texts that transformers returns
                self._prompts.tokens[row],
                drafters[row],
                _sampler(row_processors(processors, row, rows), self._generation_config),
                ends[row],
            )
            for row in range(rows)
        ]

    def listen(self, on_step: OnStep | None, streamer: BaseStreamer | None) -> None:
        """Tell `on_step` of every step, and `streamer` of every token."""
        self._on_step = on_step
        if streamer is not None:
            self._feeder = StreamFeeder(streamer, self._prompts.rows, self._pad_token)

    def run(self) -> torch.Tensor | LookaheadOutput:
        """Decode all rows, and give back what `lookahead.generate` returns."""
        keeps_cache = self._returns_cache or self._prompts.cache is not None
        try:
            self._decode(keeps_cache)
        except Exception as error:
            self._resources.restore()
            if self._parallel is not None:
                self._parallel.fail(error)
            raise
        finally:
            if self._memory is not None:
                keep_memory(self._model, self._config, self._memory)
        if self._feeder is not None:
            self._feeder.end()
        cache = self._resources.release(keeps_cache)
        texts = stack_texts(self._sequences, self._pad_token)
        if not self._generation_config.return_dict_in_generate:
            return texts
        self._batch.statistics.sources = [sequence.drafter.statistics() for sequence in self._sequences]
        return LookaheadOutput(
            sequences=texts,
            scores=stack_collected([sequence.sampler.scores for sequence in self._sequences]),
            logits=stack_collected([sequence.sampler.logits for sequence in self._sequences]),
            past_key_values=cache if self._returns_cache else None,
            statistics=self._batch.statistics,
        )

    @property
    def _pad_token(self) -> int | None:
        token = self._generation_config._pad_token_tensor
        return int(token) if token is not None and self._rule.has_eos else None

    def _drafters(self, pool: NGramPool | None) -> list[Drafter]:
        config, rows = self._config, self._prompts.rows
        if pool is None and config.share_pool:
            pool = NGramPool(config.ngram_size, config.guess_set_size)
        alike = neighbours(self._model) if self._memory is not None else None
        costs = self._costs or CostModel.prior()
        read = [warm_up_tokens(self._model, len(row), self._costs is not None) for row in self._prompts.tokens]
        return [build_drafter(config, pool, self._memory, costs, rows, alike, tokens) for tokens in read]

    def _decode(self, keeps_cache: bool) -> None:
        runner = self._resources.runner
        self._batch = batch = Batch(
            self._sequences,
            self._rule,
            on_step=self._after_step,
            tie_margin=self._config.tie_margin,
            times=self._costs,
        )
        backend: Backend = runner
        shared = None
        if self._parallel is not None:
            shared, batch.verify = self._parallel.decoding(
                runner, self._prompts.before, self._sequences, self._rule.asks_others, batch.tie_margin
            )
            backend = shared
        if self._feeder is not None:
            self._feeder.start(self._prompts.input_ids)
        with torch.no_grad():
            chunk_size = self._generation_config.prefill_chunk_size
            batch.statistics.prefill_passes = (shared or runner).prefill(self._prompts.tokens, chunk_size)
            decode(backend, batch)
            if not self._rule.has_eos:
                _even_out(backend, batch)
            if keeps_cache:
                if shared is not None:
                    shared.complete_cache([sequence.tokens for sequence in self._sequences])
                runner.complete(padded_texts(self._sequences, self._pad_token))

    def _after_step(self, record: StepRecord) -> None:
        if self._on_step is not None:
            self._on_step(record)
        if self._feeder is not None:
            self._feeder.add(record)


def _sampler(processors: LogitsProcessorList, config: GenerationConfig) -> TextSampler:
    keep = bool(config.return_dict_in_generate)
    return TextSampler(
        processor=processors if len(processors) else None,
        sample=bool(config.do_sample),
        keep_logits=keep and bool(config.output_logits),
        keep_scores=keep and bool(config.output_scores),
    )


def _even_out(backend: Backend, batch: Batch) -> None:
    """Go on with rows that ended before others: without an end-of-sequence token nothing is padded in transformers."""

    def length(sequence: TextSequence) -> int:
        return sequence.ids.shape[1]

    longest = max(map(length, batch.sequences))  # type: ignore[arg-type]
    for sequence in batch.sequences:
        sequence.finished = length(sequence) >= longest  # type: ignore[arg-type]
    batch.stop = lambda sequence: length(sequence) >= longest
    batch.times = None
    decode(backend, batch)
