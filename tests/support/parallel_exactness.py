"""One case of lookahead parallelism: the same call in one process and on several ranks.

All ranks must return the tokens of one process, and leave PyTorch's random state as it does. The calls are those of
the other suites: greedy (`exactness`), one sequence with all that changes logits (`sampling_exactness`), and ragged
batches, greedy or freely sampled, without user-defined processors and criteria (`batch_exactness`).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

import batch_exactness
import exactness
import lookahead
import sampling_exactness
from batch_exactness import BatchCase, Collector, random_batch_case
from drafting_options import config_of
from exactness import Case, random_case
from lookahead.config import BUDGETED
from lookahead.parallel import ParallelGroup, join, shard_model
from model_zoo import build, greedy
from parallel_team import Team
from sampling_exactness import SamplingCase, random_sampling_case

UNEQUAL = "gpt_oss"
"""The model of the zoo that is not the same in two processes: some of its weights begin as whatever memory held."""


@dataclass(frozen=True)
class ParallelCase:
    """One comparison.

    Attributes:
        ranks: How many ranks.
        case: What is decoded.
        seed: Seed of the draws of a batch.
        sampled: Whether the rows of a batch are sampled freely.
        timed: Whether there is a criterion that looks at the clock, so that one rank decides.
        collected: Whether logits are asked for.
    """

    ranks: int
    case: Case | SamplingCase | BatchCase
    seed: int = 0
    sampled: bool = False
    timed: bool = False
    collected: bool = False


@dataclass
class Decoded:
    """What one process, or one rank, returned.

    Attributes:
        texts: Token ids.
        state: The random state afterwards.
        logits: The raw logits of each new token, where they are asked for.
        steps: Steps of the model.
        streamed: What a streamer was given.
        error: The traceback, if it raised.
    """

    texts: list[list[int]] = field(default_factory=list)
    state: bytes = b""
    logits: torch.Tensor | None = None
    steps: int = 0
    streamed: list[Any] = field(default_factory=list)
    error: str | None = None


def decode(group: ParallelGroup | None, case: ParallelCase) -> Decoded:
    """Decode `case` on the ranks of `group`, or in this process alone."""
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            return _decode(group, case)
    except Exception:
        return Decoded(error=traceback.format_exc())


def _decode(group: ParallelGroup | None, case: ParallelCase) -> Decoded:
    model, arguments, config = _call(case)
    model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)  # dynamic RoPE forgets the longest text
    if case.timed:
        arguments["max_time"] = 600.0
    if case.collected:
        arguments["output_logits"] = True
    streamer = Collector()
    if isinstance(case.case, BatchCase) or arguments["input_ids"].shape[0] == 1:
        arguments["streamer"] = streamer
    # Rank 0's random state must rule.
    torch.manual_seed(_seed(case) + (0 if group is None else group.rank))
    output = lookahead.generate(
        model, lookahead_config=config, parallel=group, return_dict_in_generate=True, **arguments
    )
    return Decoded(
        texts=output.sequences.tolist(),
        state=torch.get_rng_state().numpy().tobytes(),
        logits=torch.stack(output.logits) if case.collected else None,
        steps=output.statistics.steps,
        streamed=streamer.puts,
    )


def _seed(case: ParallelCase) -> int:
    return case.case.seed if isinstance(case.case, SamplingCase) else case.seed


def _call(parallel_case: ParallelCase) -> tuple[Any, dict[str, Any], lookahead.LookaheadConfig]:
    """The model, all arguments, and the configuration."""
    case = parallel_case.case
    if isinstance(case, Case):
        model = build(case.architecture, case.model_seed, case.attention)
        prompt = case.prompt + greedy(model, case.prompt, case.continued)
        eos = exactness._stop_tokens(model, case, prompt)
        return model, exactness._arguments(case, prompt, eos), case.config()
    if isinstance(case, SamplingCase):
        arguments = sampling_exactness._arguments(case)
        return sampling_exactness.load(case), arguments, config_of(**case.drafting)
    model = build(case.architecture, case.model_seed, case.attention)
    arguments = {
        **batch_exactness._inputs(case),
        **batch_exactness._arguments(case),
        "num_return_sequences": case.returns,
    }
    if parallel_case.sampled:
        arguments.update(do_sample=True, top_k=0)
    return model, arguments, config_of(**case.drafting)


def compare(team: Team, case: ParallelCase) -> list[str]:
    """Decode `case` in this process and on the team; what differs, empty if nothing does."""
    wanted = decode(None, case)
    ranks = team.run(case.ranks, decode, case)
    if wanted.error is not None:
        return [f"one process: {wanted.error}"]
    problems = []
    for rank, got in enumerate(ranks):
        if isinstance(got, Exception) or got.error is not None:
            problems.append(f"rank {rank}: {got if isinstance(got, Exception) else got.error}")
            continue
        if got.texts != wanted.texts:
            problems.append(f"rank {rank}: expected {wanted.texts}\n        got      {got.texts}")
        if got.state != wanted.state:
            problems.append(f"rank {rank}: another random state afterwards")
        # Of methods that draft by probabilities, which are sent in half precision, steps may differ.
        if got.steps != wanted.steps and _method(case) not in BUDGETED:
            problems.append(f"rank {rank}: {got.steps} steps instead of {wanted.steps}")
        if got.streamed != ([] if rank else wanted.streamed):
            problems.append(f"rank {rank}: streamed {got.streamed}, not {wanted.streamed if not rank else 'nothing'}")
        if wanted.logits is not None and not torch.allclose(got.logits, wanted.logits, atol=2e-4, rtol=1e-4):
            problems.append(f"rank {rank}: logits differ by {(got.logits - wanted.logits).abs().max()}")
    again = f"from parallel_exactness import *; print(compare(Team({case.ranks}), {case!r}))"
    return [again, *problems] if problems else []


def decode_on_copies(group: ParallelGroup | None) -> list[list[int]]:
    """Texts of a model of which there are two copies, each on half of the ranks; of one process without a group."""
    model = build("llama")
    copies = None
    if group is not None:
        copies = join(tensor_parallel=2, device_type="cpu")
        assert copies.tensor_mesh is not None
        shard_model(model, copies.tensor_mesh)
    texts = []
    for do_sample in (False, True):
        torch.manual_seed(5 if copies is None else 5 + copies.rank)
        output = lookahead.generate(
            model,
            torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]]),
            lookahead_config=lookahead.LookaheadConfig(preset="paper", window_size=6, ngram_size=4, guess_set_size=6),
            parallel=copies,
            max_new_tokens=40,
            do_sample=do_sample,
        )
        texts.append(output[0].tolist())
    return texts


def _method(case: ParallelCase) -> str:
    return case.case.preset if isinstance(case.case, Case) else str(case.case.drafting.get("preset", "auto"))


def random_parallel_case(random: Random, number: int) -> ParallelCase:
    """Draw case `number`; the number of ranks and what kind of call it is go in turn."""
    ranks, kind = 1 + number % 4, number // 4 % 3
    draw: Callable[[Random], Case | SamplingCase | BatchCase]
    draw = (random_case, random_sampling_case, random_batch_case)[kind]
    case = draw(random)
    while UNEQUAL in (getattr(case, "architecture", None), getattr(case, "model", None)):
        case = draw(random)
    if isinstance(case, BatchCase):  # of code of its own nobody knows that it treats each row by itself
        known = {name: value for name, value in case.settings.items() if name not in ("parity", "allowed")}
        case = replace(case, ends=(), settings=known)
    sampled = kind == 2 and random.random() < 0.6
    if sampled and isinstance(case, BatchCase) and case.drafting["preset"] in BUDGETED:
        # Rows draw from one generator in the order of their steps, so that texts are the same only if steps are.
        case = replace(case, drafting={**case.drafting, "preset": "paper", "step_budget": None})
    timed, collected = random.random() < 0.2, random.random() < 0.2
    return ParallelCase(ranks, case, random.randrange(2**31), sampled, timed, collected)
