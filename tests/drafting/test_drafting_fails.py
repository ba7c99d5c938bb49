"""An error of a drafter or source ends the drafts of its own request, with one warning, and has no other effect."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import lookahead
from lookahead import Engine, LookaheadConfig, LookaheadWarning, Trace
from lookahead.backends.forward_result import pass_result
from lookahead.core.drafts import grouped, observe, propose
from lookahead.core.forest import Forest
from lookahead.core.pace import Pace
from lookahead.core.protocols import FixedBudget, NoDrafter
from lookahead.core.results import StepResult, StepResults, Walk, Walks
from lookahead.core.roots import Roots
from lookahead.core.sequence import SequenceState
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step import Batch, step
from lookahead.core.step_costs import StepCosts
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory, TokenPaths, TokenRecyclingDrafter
from model_zoo import build, greedy
from playback import PlayedBackend, PlayedRow, TextScript, played_sequence

PROMPTS = ([5, 8, 2, 5, 8, 2, 5], [3, 14, 15, 9, 2, 6, 3], [7, 7, 1, 7, 7, 1, 7])
TOKENS = 24
DRAFTING = LookaheadConfig(step_budget=16)


class Failing:
    """A drafter that damages the tree and raises in the second call of one of its methods."""

    def __init__(self, member: str) -> None:
        self._drafter = TokenRecyclingDrafter(8)
        self._member, self._calls = member, 0
        self.start, self.statistics = self._drafter.start, self._drafter.statistics

    def _count(self, member: str) -> None:
        self._calls += member == self._member
        if self._calls == 2 and member == self._member:
            raise KeyError(member)

    @property
    def top_k(self) -> int:
        self._count("top_k")
        return self._drafter.top_k

    def propose(self, tree: TokenTree) -> None:
        self._drafter.propose(tree)
        tree.add_candidates([1, 2, 3])
        self._count("propose")

    def observe(self, result: StepResult) -> None:
        self._count("observe")
        self._drafter.observe(result)


class FailsAtOnce(TokenRecyclingDrafter):
    def __init__(self, member: str) -> None:
        super().__init__(8)
        setattr(self, member, self._fail)

    def _fail(self, *_: object) -> None:
        raise KeyError("at once")


class FailingSource:
    name = "failing"

    def __init__(self, member: str) -> None:
        self.member, self.length = member, 0

    def start(self, prompt: Sequence[int]) -> None:
        if self.member == "start":
            raise KeyError("start")

    def propose(self) -> TokenPaths:
        if self.member == "propose" and self.length > 5:
            raise KeyError("propose")
        return TokenPaths.chain([1, 2])

    def observe(self, result: StepResult) -> None:
        self.length += len(result.tokens)
        if self.member == "observe" and self.length > 5:
            raise KeyError("observe")


def failing(make: Callable[[], Any]) -> LookaheadConfig:
    return LookaheadConfig(drafter=make, step_budget=8)


CONFIGS = [
    *[failing(lambda member=member: Failing(member)) for member in ("top_k", "propose", "observe")],
    *[failing(lambda member=member: FailsAtOnce(member)) for member in ("start", "statistics")],
    *[
        LookaheadConfig(step_budget=8, sources=(lambda member=member: FailingSource(member),))
        for member in ("start", "propose", "observe")
    ],
    LookaheadConfig(sources=(lambda: FailingSource("propose"),)),  # within the shared budget of rows
]


def warned(seen: list[warnings.WarningMessage]) -> int:
    return sum(each.category is LookaheadWarning and "drafting stopped" in str(each.message) for each in seen)


@pytest.mark.parametrize("config", CONFIGS)
def test_other_requests_of_an_engine_go_on_with_their_drafts(config: LookaheadConfig) -> None:
    model = build("llama", seed=0)
    expected = [[*prompt, *greedy(model, tuple(prompt), TOKENS)] for prompt in PROMPTS]
    engine = Engine(model, DRAFTING)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        handles = [
            engine.submit(
                prompt,
                max_new_tokens=TOKENS,
                do_sample=False,
                lookahead_config=config if place == 1 else None,
                return_dict_in_generate=True,
            )
            for place, prompt in enumerate(PROMPTS)
        ]
        engine.run()
    assert [handle.result().sequences[0].tolist() for handle in handles] == expected
    assert warned(seen) == 1
    assert all(handle.statistics.steps < TOKENS for handle in (handles[0], handles[2]))


@pytest.mark.parametrize("config", CONFIGS[:3])
def test_where_the_warning_is_an_error_it_ends_its_own_request(config: LookaheadConfig) -> None:
    model = build("llama", seed=0)
    expected = [[*prompt, *greedy(model, tuple(prompt), TOKENS)] for prompt in PROMPTS]
    engine = Engine(model, DRAFTING)
    handles = [
        engine.submit(prompt, max_new_tokens=TOKENS, do_sample=False, lookahead_config=config if place == 1 else None)
        for place, prompt in enumerate(PROMPTS)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run()
    assert [handles[place].result()[0].tolist() for place in (0, 2)] == [expected[0], expected[2]]
    with pytest.raises(LookaheadWarning, match="drafting stopped"):
        handles[1].result()


@pytest.mark.parametrize("config", [*CONFIGS[:4], *CONFIGS[5:]])  # statistics are read after the text is complete
def test_where_warnings_are_errors_no_text_is_cut_short_in_silence(config: LookaheadConfig) -> None:
    ids, options = torch.tensor(PROMPTS[:1]), {"max_new_tokens": TOKENS, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", LookaheadWarning)
        with pytest.raises(LookaheadWarning, match="drafting stopped"):
            lookahead.generate(build("llama", seed=0), ids, lookahead_config=config, **options)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_rows_of_generate_go_on(config: LookaheadConfig, rows: int) -> None:
    model = build("llama", seed=0)
    expected = [[*prompt, *greedy(model, tuple(prompt), TOKENS)] for prompt in PROMPTS[:rows]]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = lookahead.generate(
            model,
            torch.tensor(PROMPTS[:rows]),
            lookahead_config=config,
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
    assert output.sequences.tolist() == expected
    assert warned(seen) == rows


def test_one_of_several_rows_continues_without_drafts() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(Failing("propose") if len(made) == 1 else TokenRecyclingDrafter(8))
        return made[-1]

    model, sent = build("llama", seed=0), [0, 0, 0]
    expected = [[*prompt, *greedy(model, tuple(prompt), TOKENS)] for prompt in PROMPTS]

    def count(record: lookahead.StepRecord) -> None:
        sent[record.index] += record.nodes - 1

    with pytest.warns(LookaheadWarning, match=r"drafting stopped.*KeyError.*test_drafting_fails\.py:\d+"):
        output = lookahead.generate(
            model,
            torch.tensor(PROMPTS),
            lookahead_config=failing(make),
            on_step=count,
            max_new_tokens=TOKENS,
            do_sample=False,
        )
    assert output.tolist() == expected
    assert sent[1] < min(sent[0], sent[2])


class OddTopK(TokenRecyclingDrafter):
    top_k: Any

    def __init__(self, top_k: Any) -> None:
        super().__init__(8)
        self.top_k = top_k


class OddNodes(TokenRecyclingDrafter):
    """A drafter that adds an invalid node, without the tree's methods."""

    def __init__(self, token: Any, parent: int) -> None:
        super().__init__(8)
        self._node = token, parent

    def propose(self, tree: TokenTree) -> None:
        tree.add_new_candidates([self._node[0]], [self._node[1]])


@pytest.mark.parametrize("make", [lambda: OddTopK(None), lambda: OddTopK(-1), lambda: OddTopK("8")])
def test_a_drafter_that_asks_for_no_number_of_tokens_ends_no_other_request(make: Callable[[], Any]) -> None:
    test_other_requests_of_an_engine_go_on_with_their_drafts(failing(make))


@pytest.mark.parametrize(
    "node", [(float("nan"), 0), (1.5, 0), ("a", 0), (1 << 70, 0), (-1, 0), (1, -1)], ids=lambda node: f"{node}"
)
def test_a_drafter_of_nodes_that_are_none_ends_no_other_request(node: tuple[Any, int]) -> None:
    test_other_requests_of_an_engine_go_on_with_their_drafts(failing(lambda: OddNodes(*node)))


def _write_token(tree: TokenTree) -> None:
    tree.tokens[tree.root] = 1


def _write_token_and_fail(tree: TokenTree) -> None:
    tree.tokens[tree.root] = 1
    raise KeyError("changed the decided text")


def _leave_root_unread(tree: TokenTree) -> None:
    tree.needs_logits[tree.root] = False


def _move_root(tree: TokenTree) -> None:
    tree.root = tree.add_candidates([1])[0]


def _leave_candidate_unread(tree: TokenTree) -> None:
    tree.needs_logits[tree.add_candidates([3, 4])[0]] = False


@pytest.mark.parametrize(
    "damage", [_write_token, _write_token_and_fail, _leave_root_unread, _move_root, _leave_candidate_unread]
)
def test_a_drafter_that_changes_more_than_its_draft_changes_no_text(damage: Callable[[TokenTree], None]) -> None:
    class Damaging(TokenRecyclingDrafter):
        def propose(self, tree: TokenTree) -> None:
            damage(tree)

    engine = Engine(build("llama"), DRAFTING)
    damaging = LookaheadConfig(step_budget=16, drafter=lambda: Damaging(8))
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}
    handles = [engine.submit(PROMPTS[0], lookahead_config=damaging, **options), engine.submit(PROMPTS[1], **options)]
    with pytest.warns(LookaheadWarning, match="changed the decided text|a candidate without needs_logits"):
        texts = [handle.result()[0].tolist() for handle in handles]
    for prompt, text in zip(PROMPTS, texts, strict=False):
        assert text == [*prompt, *greedy(build("llama"), tuple(prompt), TOKENS)]


class Together:
    """A group that drafts for all rows in one call, and fails if one row fails."""

    def find_rows(self, drafters: Sequence[Any], rows: Sequence[int], roots: Roots) -> tuple[Any, Any]:
        for drafter in drafters:
            drafter.fail_in("find")
        return np.full(len(rows), 0.9), np.ones(len(rows), dtype=np.int64)

    def send_rows(self, drafters: Sequence[Any], rows: Sequence[int], roots: Roots, counts: Any) -> None:
        for row, count in zip(rows, counts.tolist(), strict=True):
            roots.tree(row).add_candidates([4] * count)

    def observe_rows(self, drafters: Sequence[Any], rows: Sequence[int], step: StepResults) -> None:
        for drafter in drafters:
            drafter.fail_in("observe")


class InGroup:
    """A drafter of one token that may fail in one of its methods."""

    top_k = 0

    def __init__(self, together: Together, budget: SharedPace, fails: str) -> None:
        self.together, self.budget, self._fails = together, budget, fails

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to begin."""

    def fail_in(self, method: str) -> None:
        if self._fails == method:
            raise KeyError(method)

    def statistics(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("member", ["find", "observe"])
def test_an_error_in_a_group_only_ends_the_drafts_of_the_rows_that_cause_it(member: Literal["find", "observe"]) -> None:
    together = Together()
    pace = SharedPace(lambda load, temperature: Pace(StepCosts(), load), nodes=64)
    pace.begin_step(3)
    drafters = [InGroup(together, pace, fails) for fails in ("", member, "")]
    sequences = [SequenceState([3], drafter, cast(Any, None), lambda text: False) for drafter in drafters]
    trees = [TokenTree([3]) for _ in sequences]
    forest = Forest(trees)
    results = StepResults(forest, pass_result(forest, torch.eye(3, 5), 0), Walks(forest))
    for row in range(3):
        results.walks.set(row, Walk([], [4], False))
    groups = grouped(sequences, range(3))
    ask = partial(observe, sequences, results, groups)
    if member == "find":
        ask = partial(propose, sequences, Roots(trees), groups)
    with pytest.warns(LookaheadWarning, match=f"KeyError: '{member}'"):
        ask()
    assert [isinstance(sequence.drafter, NoDrafter) for sequence in sequences] == [False, True, False]
    if member == "find":
        assert [len(tree) for tree in trees[::2]] == [2, 2]


class TimeIsUp(Exception):
    """Raised by the handler of a signal."""


@pytest.fixture
def time_limit() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


class Signalled(TokenRecyclingDrafter):
    def propose(self, tree: TokenTree) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_time_limit_ends_a_call_also_while_it_drafts(rows: int) -> None:
    model, config = build("llama"), LookaheadConfig(drafter=lambda: Signalled(8))
    prompt = torch.tensor([PROMPTS[0]] * rows)
    with pytest.raises(TimeIsUp):
        lookahead.generate(model, prompt, max_new_tokens=TOKENS, lookahead_config=config)
    engine = Engine(model, config)
    for text in PROMPTS[:rows]:
        engine.submit(text, max_new_tokens=TOKENS)
    with pytest.raises(TimeIsUp):
        engine.run()


class Slow(LlamaForCausalLM):  # type: ignore[misc]
    seconds_left = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Slow.seconds_left -= 1
        if not Slow.seconds_left:
            signal.raise_signal(signal.SIGTERM)
        return super().forward(*args, **kwargs)


@pytest.mark.usefixtures("time_limit")
def test_a_time_limit_in_a_trial_decides_nothing() -> None:
    model, prompt = cast(Any, copy.deepcopy(build("llama"))), torch.tensor([PROMPTS[0]])
    model.__class__ = Slow
    for passes in (1, 9, 30):
        Slow.seconds_left = passes
        with pytest.raises(TimeIsUp):
            lookahead.generate(model, prompt, max_new_tokens=TOKENS, lookahead_config=DRAFTING)
    Slow.seconds_left = 0
    expected = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    answer = lookahead.generate(model, prompt, max_new_tokens=TOKENS, do_sample=False, lookahead_config=DRAFTING)
    assert answer.tolist() == expected.tolist()


def test_a_trace_goes_on() -> None:
    model, trace = build("llama", seed=0), Trace()
    config = LookaheadConfig(drafter=lambda: FailsAtOnce("explain"), step_budget=8, trace=trace)
    with pytest.warns(LookaheadWarning, match="drafting stopped.*at once"):
        text = lookahead.generate(
            model, torch.tensor(PROMPTS[:1]), lookahead_config=config, max_new_tokens=TOKENS, do_sample=False
        )
    assert text[0].tolist() == [*PROMPTS[0], *greedy(model, tuple(PROMPTS[0]), TOKENS)]


class NothingToSend(FixedBudget):
    """A budget that fails to choose."""

    def choose(self, *arguments: object) -> Any:
        raise ArithmeticError("nothing to send")


def test_a_failure_of_all_drafts_ends_no_row() -> None:
    texts = [[5, 8, 2, 9, 4, 1], [3, 4, 5, 6, 7, 8]]
    memory, budget = DraftMemory(), NothingToSend(8)
    sequences = [played_sequence(text[:2], text[2:], AutoDrafter(memory, budget)) for text in texts]
    backend, batch = PlayedBackend([PlayedRow(TextScript(text)) for text in texts]), Batch(sequences)
    with pytest.warns(LookaheadWarning, match="nothing to send"):
        step(backend, batch)
    while not batch.finished:
        step(backend, batch)
    assert [sequence.tokens for sequence in sequences] == texts
