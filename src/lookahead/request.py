"""One call of `generate`, as transformers hands it over: prepared, checked, ready to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from lookahead.arguments import (
    check_devices,
    check_mode,
    check_model_inputs,
    check_positions,
    check_prompt_ids,
    prompt_tokens,
)
from lookahead.config import LookaheadConfig
from lookahead.cost_model import CostModel
from lookahead.decoder import OnStep, TreeRunner, Verify, decode, verify
from lookahead.drafting import Drafter, NGramPool, build_drafter
from lookahead.engine import ModelRunner, StaticLoan, TreeCache, adopt_cache, engine_model, equivalence, return_cache
from lookahead.errors import InvalidArgumentError
from lookahead.model_state import draft_memory, keep_memory, making, neighbours, step_costs
from lookahead.output import LookaheadOutput, stack_collected, stack_texts
from lookahead.processors import row_processors
from lookahead.prompt_reading import tokens_to_read
from lookahead.sequence import Sequence
from lookahead.statistics import Statistics, StepRecord
from lookahead.stopping import StopRule
from lookahead.streaming import StreamFeeder
from lookahead.text_limits import check_batch, check_context, check_hidden, check_kind, check_recomputing
from lookahead.verification import Target

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
    with making(model):
        engine = engine_model(model, config.pack_weights, static=config.engine != "dynamic")
    brought = _brought_cache(model_kwargs)
    mask = _whole_mask(input_ids, model_kwargs.get("attention_mask"), generation_config)
    check_positions(model_kwargs.get("position_ids"), mask)
    tokens = prompt_tokens(model, input_ids, mask[:, -input_ids.shape[1] :])
    before = _tokens_before(brought, mask, input_ids)
    cache = TreeCache() if brought is None else adopt_cache(brought, mask)
    lengths = cache.lengths(len(tokens))
    padding = [input_ids.shape[1] - len(row) for row in tokens]
    loan = _static_loan(engine, config, before, generation_config)
    steps = loan.steps if loan else None
    kind = equivalence(model)
    check_kind(kind, type(model).__name__, mask)
    runner = ModelRunner(
        engine,
        len(tokens),
        cache,
        before,
        padding,
        input_ids.device,
        steps,
        most_nodes=config.max_nodes,
        positions_end=kind.positions_end,
    )
    check_context(runner, tokens, before)
    new_tokens = generation_config.max_length - input_ids.shape[1]
    check_batch(runner, tokens, before, new_tokens)
    check_recomputing(runner, tokens, before, new_tokens, generation_config.use_cache)
    check_hidden(runner, mask, new_tokens)
    if parallel is not None:
        config = parallel.drafting(config)
        parallel.begin(model, config, generation_config, (input_ids, mask))
        if parallel.rank:
            streamer = on_step = None
    memory = draft_memory(model, config) if config.preset == "auto" else None
    # The rows of a batch share one generator, and which of them draws first depends on the nodes of the steps. So
    # that a seed gives the same texts again, these must not depend on the clock there.
    clocked = config.chooses_nodes and not (generation_config.do_sample and len(tokens) > 1)
    costs = step_costs(model, config, len(tokens)) if clocked else CostModel.prior()
    alike = neighbours(model) if memory is not None else None
    drafters = [
        build_drafter(config, pool, memory, costs, len(tokens), alike, tokens_to_read(model, len(row), clocked))
        for pool, row in zip(_pools(config, ngram_pool, tokens), tokens, strict=True)
    ]
    rule = StopRule(stopping_criteria)
    ends = _last_lengths(runner.last_length, input_ids.shape[1], tokens, before, rule.has_eos)
    sequences = _sequences(input_ids, tokens, logits_processor, generation_config, drafters, ends)
    pad_token = _pad_token(generation_config) if rule.has_eos else None
    feeder = None if streamer is None else StreamFeeder(streamer, len(tokens), pad_token)
    statistics = Statistics()

    def after_step(record: StepRecord) -> None:
        if on_step is not None:
            on_step(record)
        if feeder is not None:
            feeder.add(record)

    shared, walks = None, verify
    if parallel is not None:
        shared, walks = parallel.decoding(runner, before, sequences, rule.asks_others, config.tie_margin)
    trees = shared or runner
    returns_cache = bool(generation_config.return_dict_in_generate and generation_config.use_cache)
    try:
        if feeder is not None:
            feeder.start(input_ids)
        with torch.no_grad():
            statistics.prefill_passes = trees.prefill(tokens, generation_config.prefill_chunk_size)
            times = costs if clocked else None
            decode(trees, sequences, rule, statistics, after_step, config.tie_margin, times, walks)
            if not rule.has_eos:
                _even_out(trees, sequences, statistics, after_step, config.tie_margin, walks)
            if brought is not None or returns_cache:
                if shared is not None:
                    shared.complete_cache([sequence.tokens for sequence in sequences])
                runner.complete(_padded_texts(sequences, pad_token))
    except Exception as error:
        cache.restore(lengths)  # the caller's cache is as it was before the call that failed
        if parallel is not None:
            parallel.fail(error)
        raise
    finally:
        if memory is not None:
            keep_memory(model, config, memory)
    statistics.sources = [drafter.statistics() for drafter in drafters]
    if feeder is not None:
        feeder.end()
    if loan is not None:
        if brought is not None or returns_cache:
            loan.copy_cache(cache)
        loan.end()
    kept = return_cache(cache, brought, mask) if brought is not None or returns_cache else None
    texts = stack_texts(sequences, pad_token)
    if not generation_config.return_dict_in_generate:
        return texts
    return LookaheadOutput(
        sequences=texts,
        scores=stack_collected([sequence.target.scores for sequence in sequences]),
        logits=stack_collected([sequence.target.logits for sequence in sequences]),
        past_key_values=kept if returns_cache else None,
        statistics=statistics,
    )


def _static_loan(
    engine: PreTrainedModel, config: LookaheadConfig, before: list[int], generation_config: GenerationConfig
) -> StaticLoan | None:
    """What the engine that was chosen needs beforehand, if it is not the dynamic one."""
    if config.engine == "dynamic" or config.tie_margin > 0:
        return None
    longest = max(before) + generation_config.max_length
    compiler = "inductor" if config.engine == "compiled" else None
    loan = StaticLoan(engine, len(before), longest, config.max_nodes, compiler)
    return loan if loan.steps is not None else None


def _brought_cache(model_kwargs: dict[str, Any]) -> Cache | None:
    """The cache that the caller passed, if any; transformers marks it, and makes an empty one where there is none."""
    cache: Cache | None = model_kwargs.get("past_key_values")
    return cache if getattr(cache, "_is_user_defined", False) else None


def _pad_token(config: GenerationConfig) -> int | None:
    return None if config._pad_token_tensor is None else int(config._pad_token_tensor)


def _pools(config: LookaheadConfig, pool: NGramPool | None, rows: list[list[int]]) -> list[NGramPool | None]:
    """The n-gram pool of each row; `None` for one of its own."""
    if pool is None and config.share_pool:
        pool = NGramPool(config.ngram_size, config.guess_set_size)
    return [pool] * len(rows)


def _sequences(
    input_ids: torch.Tensor,
    tokens: list[list[int]],
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    drafters: list[Drafter],
    ends: list[int] | list[None],
) -> list[Sequence]:
    """One sequence for each row, with a drafter and a target of its own."""
    rows = len(tokens)
    return [
        Sequence(
            input_ids[row : row + 1].long(),  # as the texts that transformers returns
            tokens[row],
            drafters[row],
            _target(row_processors(processors, row, rows), generation_config),
            ends[row],
        )
        for row in range(rows)
    ]


def _last_lengths(
    last_length: int | None, width: int, tokens: list[list[int]], before: list[int], has_eos: bool
) -> list[int] | list[None]:
    """Lengths, padding included, at which the model can read no further token of each row.

    Where nothing fills up a row that ended, all of them end with the first.
    """
    if last_length is None:
        return [None] * len(tokens)
    ends = [last_length - earlier + width - len(row) for row, earlier in zip(tokens, before, strict=True)]
    return ends if has_eos else [min(ends)] * len(ends)


def _target(processors: LogitsProcessorList, config: GenerationConfig) -> Target:
    keep = bool(config.return_dict_in_generate)
    return Target(
        processor=processors if len(processors) else None,
        sample=bool(config.do_sample),
        keep_logits=keep and bool(config.output_logits),
        keep_scores=keep and bool(config.output_scores),
    )


def _whole_mask(
    input_ids: torch.Tensor, mask: torch.Tensor | None, generation_config: GenerationConfig
) -> torch.Tensor:
    """Which tokens of the whole text count, `[batch, tokens]` bool: of what is cached and left out of the prompt, too.

    Raises:
        InvalidArgumentError: The mask is shorter than the prompt.
    """
    rows, tokens = input_ids.shape
    if mask is None:
        # transformers drops a mask of ones, and notes how long it was
        tokens = getattr(generation_config, "_mask_length", None) or tokens
        mask = torch.ones(rows, tokens)
    if mask.shape[1] < input_ids.shape[1]:
        raise InvalidArgumentError(
            f"attention_mask of shape {tuple(mask.shape)} is shorter than input_ids of shape {tuple(input_ids.shape)}"
        )
    return mask.to(input_ids.device).bool()


def _tokens_before(cache: Cache | None, mask: torch.Tensor, input_ids: torch.Tensor) -> list[int]:
    """How many tokens that count come before each row's prompt: those of the cache, or none if the prompt repeats them.

    As in transformers, an attention mask that is longer than the prompt says that the prompt is new text alone.

    Args:
        cache: What the caller passed, if anything.
        mask: Which tokens of the whole text count, `[batch, columns]` bool.
        input_ids: The prompts with their padding.

    Raises:
        InvalidArgumentError: The cache does not fit the prompt.
    """
    held = 0 if cache is None else cache.get_seq_length()
    earlier = mask.shape[1] - input_ids.shape[1]
    if earlier:
        if earlier != held:
            raise InvalidArgumentError(
                f"attention_mask counts {earlier} tokens before input_ids, but past_key_values holds {held}; a mask is "
                "as long as input_ids, or as the cached text and input_ids together"
            )
        return [int(count) for count in mask[:, :earlier].sum(dim=1)]
    if held >= input_ids.shape[1]:
        raise InvalidArgumentError(
            f"past_key_values holds {held} tokens, but input_ids has {input_ids.shape[1]}: give the whole text with at "
            "least one new token, or new tokens alone with an attention_mask over the whole text"
        )
    return [0] * len(input_ids)


def _padded_texts(sequences: list[Sequence], pad_token: int | None) -> list[list[int]]:
    """The texts as plain decoding leaves them in its cache: it goes on with a row that ended, by padding."""
    longest = max(sequence.ids.shape[1] for sequence in sequences)
    texts = []
    for sequence in sequences:
        missing = longest - sequence.ids.shape[1]
        if sequence.last_length is not None:
            missing = min(missing, sequence.last_length - sequence.ids.shape[1])
        texts.append([*sequence.tokens, *[pad_token or 0] * missing])
    return texts


def _even_out(
    runner: TreeRunner,
    sequences: list[Sequence],
    statistics: Statistics,
    on_step: OnStep,
    tie_margin: float,
    verify: Verify,
) -> None:
    """Go on with rows that ended before others: without an end-of-sequence token nothing is padded in transformers."""
    longest = max(sequence.ids.shape[1] for sequence in sequences)
    for sequence in sequences:
        sequence.finished = sequence.ids.shape[1] >= longest
    decode(runner, sequences, lambda text: text.ids.shape[1] >= longest, statistics, on_step, tie_margin, verify=verify)
