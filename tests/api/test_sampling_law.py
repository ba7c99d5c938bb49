"""Sampled texts have the model's distribution, with our verification and with the paper's Algorithm 4.

The space can be enumerated: texts of 3 tokens from a vocabulary of 5. The model gives the exact probability of each of
the 125 texts, and a chi-square test compares it with many sampled texts. The pool begins with random candidates, so
each run accepts some candidates wholly, some partly, and some not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig, NGramPool
from paper_sampling import NextDistribution, verify_by_rejection

VOCABULARY = 5
LENGTH = 3
"""Tokens of a text and of a candidate."""
PROMPT = (0, 3, 1, 4)
DRAWS = 10_000
LEVEL = 1e-4
"""Significance level: a right law fails for this share of seeds, and the seeds are fixed."""
FEWEST_EXPECTED = 5.0
"""Expected texts in each bin of the chi-square test, at least; rarer texts share a bin."""
CANDIDATES = 4
"""Candidates for each first token: with 125 texts to choose from, most positions accept some and reject some."""
CONFIG = LookaheadConfig(window_size=1, ngram_size=LENGTH + 1, guess_set_size=CANDIDATES)

Text = tuple[int, ...]
Law = dict[Text, float]


@cache
def model() -> PreTrainedModel:
    """A random Llama with a vocabulary of 5; the next token is uncertain and depends on the text."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    built = LlamaForCausalLM(config).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.5 * 1.5)
    return built


@torch.inference_mode()
def next_distributions(processors: LogitsProcessorList | None = None) -> dict[Text, torch.Tensor]:
    """Return the distribution of the next token after the prompt and each shorter text, `[vocabulary]` float64."""
    distributions = {}
    for length in range(LENGTH + 1):
        texts = list(product(range(VOCABULARY), repeat=length))
        ids = torch.tensor([PROMPT + text for text in texts])
        scores = model()(ids).logits[:, -1]
        if processors is not None:
            scores = processors(ids, scores)
        distributions.update(zip(texts, torch.softmax(scores.double(), dim=-1), strict=True))
    return distributions


def exact_law(distributions: dict[Text, torch.Tensor]) -> Law:
    """Return the probability of each text."""
    return {
        text: float(torch.stack([distributions[text[:place]][token] for place, token in enumerate(text)]).prod())
        for text in product(range(VOCABULARY), repeat=LENGTH)
    }


def p_value(texts: Sequence[Text], law: Law) -> float:
    """Return the probability that texts with this law deviate at least this far from the expected counts.

    Chi-square tests of the first token, the first two, and the whole texts: few bins reveal early errors best. The
    result is the smallest of the three probabilities, times three (Bonferroni).
    """
    assert set(texts) <= set(law)
    attempts = []
    for length in range(1, LENGTH + 1):
        expected: Counter[Text] = Counter()
        for text, probability in law.items():
            expected[text[:length]] += probability * len(texts)
        attempts.append(_p_value(Counter(text[:length] for text in texts), expected))
    return min(1.0, LENGTH * min(attempts))


def _p_value(counts: Counter[Text], expected: Counter[Text]) -> float:
    bins: list[tuple[float, int]] = []
    rare_expected, rare_count = 0.0, 0
    for text, number in expected.items():
        if number < FEWEST_EXPECTED:
            rare_expected += number
            rare_count += counts[text]
        else:
            bins.append((number, counts[text]))
    if rare_expected:
        bins.append((rare_expected, rare_count))
    statistic = sum((count - number) ** 2 / number for number, count in bins)
    return chi_square_tail(statistic, len(bins) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variable exceeds `statistic`."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def warm_pool(seed: int = 0) -> NGramPool:
    """Return a pool with random n-grams for each first token."""
    random = Random(seed)
    pool = NGramPool(LENGTH + 1, CANDIDATES)
    texts = list(product(range(VOCABULARY), repeat=LENGTH))
    for first in range(VOCABULARY):
        for text in random.sample(texts, CANDIDATES):
            pool.add((first, *text))
    return pool


def draw_with_lookahead(draws: int, batch: int, **options: Any) -> tuple[list[Text], list[int]]:
    """Return texts sampled by `lookahead.generate`, `batch` per call, and the number of accepted tokens by step."""
    texts: list[Text] = []
    accepted: list[int] = []
    for number in range(draws // batch):
        sampled = lookahead.generate(
            model(),
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            lookahead_config=CONFIG,
            ngram_pool=warm_pool(number),
            on_step=lambda step: accepted.append(len(step.tokens)),
            max_new_tokens=LENGTH,
            do_sample=True,
            top_k=0,
            num_return_sequences=batch,
            **options,
        )
        texts += [tuple(text) for text in sampled[:, len(PROMPT) :].tolist()]
    return texts, accepted


Verify = Callable[[Sequence[Sequence[int]], NextDistribution, torch.Generator], list[int]]


def draw_with_algorithm_4(
    draws: int, distributions: dict[Text, torch.Tensor], verify: Verify, seed: int = 0
) -> tuple[list[Text], list[int]]:
    """Return texts sampled step by step by `verify`, and the number of accepted tokens by step.

    A text ends at its full length, as in decoding, even if its last step decided more tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    pools = [warm_pool(number) for number in range(16)]
    texts: list[Text] = []
    accepted: list[int] = []
    for number in range(draws):
        pool, text = pools[number % len(pools)], ()
        while len(text) < LENGTH:
            guesses = [guess[: LENGTH - len(text)] for guess in pool.lookup((*PROMPT, *text)[-1])]
            tokens = verify(guesses, lambda more, before=text: distributions[before + more], generator)
            accepted.append(len(tokens))
            text += tuple(tokens)
        texts.append(text[:LENGTH])
    return texts, accepted


def assert_drafts_were_accepted(accepted: list[int]) -> None:
    """Check that candidates were accepted wholly, partly and not at all; else equal laws would prove nothing."""
    assert {1, 2, 3} <= set(accepted)
    assert sum(length > 1 for length in accepted) > len(accepted) / 4


@pytest.mark.slow_by_nature("a law needs thousands of texts")
def test_our_sampling_in_batches_has_the_exact_law() -> None:
    torch.manual_seed(0)
    texts, accepted = draw_with_lookahead(DRAWS // 2, batch=500)
    assert_drafts_were_accepted(accepted)
    assert len(texts) == DRAWS // 2
    assert p_value(texts, exact_law(next_distributions())) > LEVEL


@pytest.mark.exact
def test_our_sampling_text_by_text_has_the_exact_law() -> None:
    torch.manual_seed(1)
    texts, accepted = draw_with_lookahead(1_000, batch=1)
    assert_drafts_were_accepted(accepted)
    assert p_value(texts, exact_law(next_distributions())) > LEVEL


def test_our_sampling_with_processors_has_the_exact_law() -> None:
    torch.manual_seed(2)
    shaping = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(1.5)])
    law = exact_law(next_distributions(shaping))
    texts, accepted = draw_with_lookahead(2_000, batch=500, logits_processor=shaping)
    assert_drafts_were_accepted(accepted)
    assert p_value(texts, law) > LEVEL
    assert p_value(texts, exact_law(next_distributions())) < LEVEL, "processors must matter for this to mean anything"


def test_algorithm_4_has_the_exact_law() -> None:
    distributions = next_distributions()
    texts, accepted = draw_with_algorithm_4(DRAWS, distributions, verify_by_rejection)
    assert_drafts_were_accepted(accepted)
    assert p_value(texts, exact_law(distributions)) > LEVEL


# --- the test has teeth: with a wrong verification the law is noticed to be another ---------------------------


def _verify_without_model(
    guesses: Sequence[Sequence[int]], law: NextDistribution, random: torch.Generator
) -> list[int]:
    """Accept the first candidate without the model."""
    return list(guesses[0])


def _verify_carelessly(
    guesses: Sequence[Sequence[int]], law: NextDistribution, random: torch.Generator, zero: bool, normalise: bool
) -> list[int]:
    """Algorithm 4 without the removal of rejected tokens, or without the normalisation."""
    remaining, decided = list(guesses), ()
    while remaining and len(decided) < len(remaining[0]):
        left, place = law(decided).clone(), len(decided)
        for guess in remaining:
            token = guess[place]
            if torch.rand((), generator=random) < left[token]:
                break
            if zero:
                left[token] = 0.0
            if normalise:
                left /= left.sum()
        else:
            return [*decided, int(torch.multinomial(left, 1, generator=random))]
        decided += (token,)
        remaining = [guess for guess in remaining if guess[place] == token]
    return [*decided, int(torch.multinomial(law(decided), 1, generator=random))]


def test_the_careless_algorithm_4_is_right_where_it_takes_care() -> None:
    distributions = next_distributions()
    texts, _ = draw_with_algorithm_4(4_000, distributions, partial(_verify_carelessly, zero=True, normalise=True))
    assert p_value(texts, exact_law(distributions)) > LEVEL


@pytest.mark.parametrize(
    "wrong",
    [
        _verify_without_model,
        partial(_verify_carelessly, zero=False, normalise=True),
        partial(_verify_carelessly, zero=True, normalise=False),
    ],
    ids=["accepts the first candidate", "keeps rejected tokens", "does not normalise"],
)
def test_a_wrong_algorithm_4_is_noticed(wrong: Verify) -> None:
    distributions = next_distributions()
    texts, _ = draw_with_algorithm_4(4_000, distributions, wrong)
    assert p_value(texts, exact_law(distributions)) < LEVEL


# --- the parts ------------------------------------------------------------------------------------------------


def certain(*tokens: int) -> NextDistribution:
    """Return the distribution of a single text, `tokens`."""
    return lambda decided: torch.eye(VOCABULARY)[tokens[len(decided)]]


@pytest.mark.parametrize(
    ("candidates", "decided"),
    [
        ([], [3]),
        ([(1, 2)], [3]),
        ([(1, 2), (3, 2)], [3, 1]),
        ([(3, 2), (3, 1)], [3, 1, 4]),
        ([(2, 1), (3, 1), (3, 1)], [3, 1, 4]),
    ],
)
def test_algorithm_4_where_the_model_leaves_no_choice(candidates: list[tuple[int, ...]], decided: list[int]) -> None:
    for seed in range(20):
        assert verify_by_rejection(candidates, certain(3, 1, 4), torch.Generator().manual_seed(seed)) == decided


def test_algorithm_4_only_computes_verified_positions() -> None:
    texts: list[Text] = []

    def law(decided: Text) -> torch.Tensor:
        texts.append(decided)
        return certain(3, 1, 4)(decided)

    verify_by_rejection([(3, 2), (3, 4)], law)
    assert texts == [(), (3,)]


def test_algorithm_4_draws_from_the_default_generator_if_none_is_given() -> None:
    distributions = next_distributions()
    torch.manual_seed(5)
    first = [verify_by_rejection([(1, 2)], distributions.__getitem__) for _ in range(20)]
    torch.manual_seed(5)
    assert [verify_by_rejection([(1, 2)], distributions.__getitem__) for _ in range(20)] == first


def test_algorithm_4_leaves_distributions_as_they_are() -> None:
    distribution = torch.full((VOCABULARY,), 0.2, dtype=torch.float64)
    verify_by_rejection([(0,), (1,), (2,), (3,)], lambda _: distribution)
    assert torch.equal(distribution, torch.full((VOCABULARY,), 0.2, dtype=torch.float64))


def test_algorithm_4_takes_candidates_of_one_length() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[2, 1\] tokens"):
        verify_by_rejection([(1, 2), (3,)], certain(3, 1, 4))


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"), [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (149.449253, 100, 0.001)]
)
def test_chi_square_tail_is_that_of_the_tables(statistic: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=1e-5)


def test_the_law_is_spread_over_many_texts() -> None:
    law = exact_law(next_distributions())
    assert sum(law.values()) == pytest.approx(1.0)
    assert max(law.values()) < 0.2
    assert sum(probability * DRAWS >= FEWEST_EXPECTED for probability in law.values()) > 90
