"""Lookahead parallelism: any number of ranks gives the tokens of one process, and a failed rank ends all.

`make test-parallel` runs many more cases of this kind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import StoppingCriteria

import lookahead
from compared.case import Case, zoo_case
from compared.outcome import EQUAL
from compared.ranks import decode_for_ever, run_on_ranks
from compared.report import describe
from compared.tables import TABLES
from lookahead import LookaheadConfig, ParallelError
from lookahead.parallel import ParallelGroup, join, scale_config
from model_zoo import build
from parallel_team import Team

RANKS = 3
PROMPT = (3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6)
SIZES = {"preset": "paper", "window_size": 6, "ngram_size": 4, "guess_set_size": 6, "pool_from_prompt": True}
CONFIG = LookaheadConfig(**SIZES)


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    """The team of all tests, as its start takes most of this file's time; empty before, and after one that ends it."""
    teams: list[Team] = []
    yield teams
    for team in teams:
        team.close()


@pytest.fixture
def team(teams: list[Team]) -> Team:
    """The ranks."""
    if not teams:
        teams.append(Team(RANKS))
    return teams[0]


def check(team: Team, case: Case, ranks: int = RANKS) -> None:
    """Run a case on some of the ranks, and check that it matches."""
    outcome = run_on_ranks(replace(case, ranks=ranks), team)
    assert outcome.kind == EQUAL, describe(outcome, "ranks")


@pytest.mark.parametrize("ranks", range(1, RANKS + 1))
def test_ranks_write_the_greedy_text_of_one_process(team: Team, ranks: int) -> None:
    check(team, zoo_case("llama", PROMPT, drafting=SIZES), ranks)


@pytest.mark.parametrize("ranks", range(1, RANKS + 1))
def test_sampling_with_processors_that_have_a_memory(team: Team, ranks: int) -> None:
    settings = {"temperature": 0.8, "top_k": 0, "repetition_penalty": 1.1, "processor": "fatigue"}
    check(team, zoo_case("qwen3", PROMPT, drafting=SIZES, do_sample=True, seed=4, **settings), ranks)


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 0, "seed": 3}])
def test_ranks_write_the_rows_of_a_ragged_batch(team: Team, sampled: dict[str, Any]) -> None:
    options = {"drafting": SIZES, "eos": (1, 2, 3), "streamer": True, **sampled}
    check(team, zoo_case("gemma2", PROMPT, (5,), PROMPT[:4], **options))


def test_models_with_length_dependent_rope_are_exact(team: Team) -> None:
    """A slower rank must not mix tokens from before and after the change of frequencies in one pass."""
    for architecture in ("llama_dynamic_rope", "phi3_long_rope"):
        check(team, zoo_case(architecture, PROMPT, drafting=SIZES | {"pool_from_output": True}))


def test_one_rank_reads_the_clock(team: Team) -> None:
    check(team, zoo_case("llama", PROMPT, drafting=SIZES, max_time=600.0))


def test_ranks_return_the_logits_of_one_process(team: Team) -> None:
    check(team, zoo_case("llama", PROMPT, drafting=SIZES, output_logits=True))


@pytest.mark.parametrize("number", range(3, 24, 5))
def test_ranks_write_the_text_of_one_process_in_random_cases(team: Team, number: int) -> None:
    case = TABLES["ranks"].draw(number)
    assert case is not None
    check(team, case, min(case.ranks, RANKS))


def test_one_exchange_of_few_bytes_a_step(team: Team) -> None:
    """W = G = 15, N = 5: the two other ranks together get far less than 4 KB."""
    steps, sent = team.run(RANKS, _sent)[0]
    assert len(sent) == steps > 10
    assert sum(sent) * (RANKS - 1) / steps < 1024


def test_one_more_exchange_for_each_token_that_is_sampled(team: Team) -> None:
    steps, sent = team.run(RANKS, _sent, True)[0]
    assert len(sent) == steps + _LIMITS["max_new_tokens"]
    assert max(sent) * (RANKS - 1) < 2048


def _sent(group: ParallelGroup, do_sample: bool = False) -> tuple[int, list[int]]:
    """Return the steps of a call, and the bytes that this rank sends to each other rank per exchange."""
    fresh = _fresh(group)
    config = LookaheadConfig(
        preset="paper", window_size=15, ngram_size=5, guess_set_size=15, pool_from_prompt=True, pool_from_output=True
    )
    arguments = {**_LIMITS, "do_sample": do_sample, "temperature": 0.5 if do_sample else None}
    arguments |= {"return_dict_in_generate": True, "parallel": fresh}
    sent: list[int] = []
    exchange = fresh._exchange
    gather = exchange.gather
    exchange.gather = lambda own: (sent.append(len(own)), gather(own))[1]  # type: ignore[method-assign]
    output = lookahead.generate(build("llama"), torch.tensor([PROMPT]), lookahead_config=config, **arguments)
    return output.statistics.steps, sent[1:]  # the first exchange compares the calls


_LIMITS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


def _fresh(group: ParallelGroup, timeout: float = 300.0) -> ParallelGroup:
    """Return another group of all ranks, which a test may break."""
    processes: Any = dist.new_group(list(range(group.size)), backend="gloo", timeout=timedelta(seconds=1200))
    return join(timeout, process_group=processes)


# --- the choices of a configuration ---------------------------------------------------------------------------


def test_ranks_write_the_same_text_with_the_static_engine(team: Team) -> None:
    config = replace(CONFIG, engine="static")
    expected = _run(None, CONFIG, {})
    for got in team.run(RANKS, _run, config, {}):
        assert got == expected


@pytest.mark.parametrize("preset", ["auto", "token_recycling", "context_matches"])
def test_ranks_write_the_same_text_with_other_presets(team: Team, preset: str) -> None:
    """Tokens must be equal; steps may differ, as probabilities are sent in half precision."""
    config = LookaheadConfig(preset=preset)
    for ranks in (1, RANKS):
        texts = [got["text"] for got in team.run(ranks, _run, config, {})]
        assert texts == [_run(None, config, {})["text"]] * ranks


def _run(group: ParallelGroup | None, config: LookaheadConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments = {**_LIMITS, **arguments, "return_dict_in_generate": True}
    output = lookahead.generate(
        build("llama"), torch.tensor([PROMPT]), lookahead_config=config, parallel=group, **arguments
    )
    return {"text": output.sequences.tolist(), "steps": output.statistics.steps}


def test_returned_caches_can_be_continued(team: Team) -> None:
    """Every rank returns the whole cache, even if other ranks ran the last tokens."""
    expected = _two_turns(None)
    for got in team.run(RANKS, _two_turns):
        assert got == expected


def _two_turns(group: ParallelGroup | None) -> tuple[int, Any]:
    model, ids = build("llama"), torch.tensor([PROMPT])
    arguments = {"lookahead_config": CONFIG, "parallel": group, "return_dict_in_generate": True, **_LIMITS}
    first = lookahead.generate(model, ids, **arguments)
    length = first.past_key_values.get_seq_length()
    again = torch.cat([first.sequences, torch.tensor([[9, 9, 4]])], dim=1)
    second = lookahead.generate(model, again, past_key_values=first.past_key_values, **arguments)
    return length, second.sequences.tolist()


def test_sizes_grow_with_the_ranks() -> None:
    config = LookaheadConfig(preset="paper", window_size=15, ngram_size=5, guess_set_size=10, seed=3)
    assert scale_config(config, 4) == replace(config, window_size=60, guess_set_size=40)
    assert scale_config(LookaheadConfig(preset="auto", step_budget=32), 2).step_budget == 64
    with pytest.raises(lookahead.InvalidArgumentError, match="ranks=0"):
        scale_config(config, 0)


@pytest.mark.skipif("RANK" in os.environ, reason="a launcher started this process")
def test_join_without_a_launcher_names_torchrun() -> None:
    with pytest.raises(lookahead.InvalidArgumentError, match="torchrun"):
        join()


# --- failures -------------------------------------------------------------------------------------------------


def test_different_calls_on_ranks_are_refused_before_anything_runs(team: Team) -> None:
    for what, name in (("model", "the model"), ("prompt", "input_ids"), ("length", "the generation configuration")):
        for error in team.run(RANKS, _differing, what):
            assert f"{name} on rank 1 differs from that on rank 0" in error
    check(team, zoo_case("llama", PROMPT, drafting=SIZES))  # the group still works


def _differing(group: ParallelGroup, what: str) -> str:
    odd = group.rank == 1
    model = build("llama", seed=1 if odd and what == "model" else 0)
    prompt = torch.tensor([PROMPT[::-1] if odd and what == "prompt" else PROMPT])
    try:
        lookahead.generate(
            model,
            prompt,
            lookahead_config=CONFIG,
            parallel=group,
            max_new_tokens=9 if odd and what == "length" else 10,
            do_sample=False,
        )
    except ParallelError as error:
        return str(error)
    return "no error"


class _Trouble(StoppingCriteria):  # type: ignore[misc]
    """Call a function once, after a few tokens."""

    def __init__(self, trouble: Callable[[], None]) -> None:
        self._trouble = trouble

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPT) + 8:
            self._trouble()
        return torch.tensor([False])


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def _hang() -> None:
    """Wait until the other ranks have ended."""
    _store().wait(["_hang on rank 0", "_hang on rank 2"])


def _hold_the_lock() -> None:
    """Block all Python threads of this process for ten heartbeats, like a busy machine; others stand still at its end.

    Their waits for this rank then end by the time limit and by its message at once.
    """
    others = " ".join(_store().get(f"process of rank {rank}").decode() for rank in (0, 2))
    subprocess.Popen(["sh", "-c", f"sleep 5; kill -STOP {others}; sleep 3; kill -CONT {others}"])
    ctypes.PyDLL(None).sleep(6)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def test_a_rank_that_runs_out_of_memory_ends_all(team: Team) -> None:
    outcomes = team.run(RANKS, _troubled, _out_of_memory, 60.0)
    assert outcomes[1][0] == "OutOfMemoryError"
    for rank in (0, 2):
        kind, message = outcomes[rank]
        assert kind == "ParallelError"
        assert "rank 1 failed: OutOfMemoryError: tried to allocate 2 GiB" in message


def test_a_rank_that_hangs_ends_all(team: Team) -> None:
    for kind, message in team.run(RANKS, _troubled, _hang, 8.0):
        assert kind == "ParallelError"
        assert "rank 1 did not come within 8 s" in message


def test_a_rank_that_sends_no_heartbeat_for_a_while_is_waited_for(team: Team) -> None:
    assert team.run(RANKS, _troubled, _hold_the_lock, 120.0) == [("", "")] * RANKS


def _troubled(group: ParallelGroup, trouble: Callable[[], None], timeout: float) -> tuple[str, str]:
    _store().set(f"process of rank {group.rank}", str(os.getpid()))
    # Compile and load first, which may exceed the timeout on a busy machine.
    lookahead.generate(build("llama"), torch.tensor([PROMPT]), lookahead_config=CONFIG, parallel=group, **_LIMITS)
    fresh = _fresh(group, timeout)
    criteria = [_Trouble(trouble if group.rank == 1 else _nothing)]
    kind, message = "", ""
    try:
        lookahead.generate(
            build("llama"),
            torch.tensor([PROMPT]),
            lookahead_config=CONFIG,
            parallel=fresh,
            stopping_criteria=criteria,
            **_LIMITS,
        )
    except Exception as error:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, ParallelError):
            with pytest.raises(ParallelError):  # the group stays unusable
                lookahead.generate(build("llama"), torch.tensor([PROMPT]), parallel=fresh, **_LIMITS)
    _store().set(f"{trouble.__name__} on rank {group.rank}", "has ended")
    return kind, message


def _nothing() -> None:
    pass


def test_a_rank_that_is_killed_ends_all(team: Team, teams: list[Team]) -> None:
    teams.remove(team)
    team.begin(RANKS, decode_for_ever)
    time.sleep(2)
    os.kill(team.processes[2].pid, signal.SIGKILL)
    for rank in (0, 1):
        assert "rank 2" in team.result(rank)
    team.close()
