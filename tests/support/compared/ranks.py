"""Cases of lookahead parallelism: the same call in one process and on several ranks.

All ranks must return the tokens of one process, and leave the same random state in PyTorch.
"""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import lookahead
from compared.calls import Answer, call
from compared.case import Case
from compared.models import forget, load
from compared.outcome import EQUAL, WRONG, Outcome, difference
from lookahead.config import BUDGETED
from lookahead.parallel import ParallelGroup, join, shard_model
from model_zoo import build
from parallel_team import Team


def decode(group: ParallelGroup | None, case: Case) -> Answer | str:
    """Return the answer of `case` on the ranks of `group`, or in only this process; a traceback if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = load(case)
            forget(model)
            return replace(call(model, case.turns[0], None, ours=True, group=group), cache=None)
    except Exception:
        return traceback.format_exc()


@cache
def _team() -> Team:
    return Team(4)


def run_on_ranks(case: Case, team: Team | None = None) -> Outcome:
    """Decode `case` in this process and on the ranks of a team, and compare."""
    expected = decode(None, case)
    if isinstance(expected, str):
        return Outcome(case, WRONG, f"one process: {expected}")
    for rank, got in enumerate((team or _team()).run(case.ranks, decode, case)):
        problem = str(got) if not isinstance(got, Answer) else _problem(case, rank, got, expected)
        if problem:
            return Outcome(case, WRONG, f"rank {rank}: {problem}")
    return Outcome(case, EQUAL, tokens=expected.new_tokens * len(expected.sequences), answers=[expected])


def _problem(case: Case, rank: int, got: Answer, expected: Answer) -> str:
    if rank:  # only rank 0 streams
        expected = replace(expected, streamed=[] if expected.streamed is not None else None)
    if description := difference(got, expected, case.turns[0]):
        return description
    # Steps may differ with drafts by probabilities, which are sent in half precision.
    by_probability = case.turns[0].drafting.get("preset", "auto") in BUDGETED
    if not by_probability and len(got.accepted) != len(expected.accepted):
        return f"{len(got.accepted)} steps instead of {len(expected.accepted)}"
    return "" if torch.equal(got.random_state, expected.random_state) else "another random state afterwards"


def decode_on_copies(group: ParallelGroup | None) -> list[list[int]]:
    """Return texts of two copies of a model, each on half of the ranks; without a group, of one process."""
    model = build("llama")
    copies = None
    if group is not None:
        copies = join(tensor_parallel=2, device_type="cpu")
        assert copies.tensor_mesh is not None
        shard_model(model, copies.tensor_mesh)
    options: dict[str, Any] = {
        "lookahead_config": lookahead.LookaheadConfig(preset="paper", window_size=6, ngram_size=4, guess_set_size=6),
        "parallel": copies,
        "max_new_tokens": 40,
    }
    texts = []
    for do_sample in (False, True):
        torch.manual_seed(5 if copies is None else 5 + copies.rank)
        prompt = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
        texts.append(lookahead.generate(model, prompt, do_sample=do_sample, **options)[0].tolist())
    return texts


def decode_for_ever(group: ParallelGroup) -> str:
    """Decode until an error, and return its message."""
    config = lookahead.LookaheadConfig(preset="paper", window_size=6, ngram_size=4, guess_set_size=6)
    options = {"lookahead_config": config, "parallel": group, "max_new_tokens": 200, "do_sample": False}
    try:
        while True:
            lookahead.generate(build("llama"), torch.tensor([[3, 14, 15, 9, 2, 6]]), **options)
    except lookahead.ParallelError as error:
        return str(error)
