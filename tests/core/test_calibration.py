"""Correcting probabilities by what was accepted."""

import numpy as np
import pytest

from lookahead.core.calibration import Calibration


def test_at_first_probabilities_are_unchanged() -> None:
    predicted = np.array([1.0, 0.8, 0.3, 0.3, 1e-5, 0.0])
    np.testing.assert_array_equal(Calibration().correct(predicted), predicted)


@pytest.mark.parametrize("share", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("leans", [False, True])
def test_corrected_probabilities_are_the_shares_that_were_accepted(share: float, leans: bool) -> None:
    generator, calibration = np.random.default_rng(0), Calibration(leans)
    for _ in range(3000):
        predicted = np.sort(generator.uniform(0.02, 0.6, size=20))[::-1]
        calibration.learn(predicted, np.flatnonzero(generator.random(20) < share * predicted).tolist())
    predicted = np.array([0.55, 0.3, 0.2, 0.1, 0.05])
    np.testing.assert_allclose(calibration.correct(predicted), share * predicted, rtol=0.2, atol=0.01)


def test_corrected_probabilities_descend_and_are_probabilities() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.learn(np.array([0.9, 0.5, 0.1]), [1, 2])  # the likelier, the rarer
    corrected = calibration.correct(np.linspace(1.0, 0.0, 300))
    assert (np.diff(corrected) <= 0).all()
    assert corrected.min() >= 0
    assert corrected.max() <= 1


def test_what_is_long_past_is_forgotten() -> None:
    generator, calibration, predicted = np.random.default_rng(0), Calibration(), np.full(8, 0.5)
    for _ in range(3000):
        calibration.learn(predicted, [])
    for _ in range(3000):
        calibration.learn(predicted, generator.choice(8, 4, replace=False).tolist())
    assert calibration.correct(predicted) == pytest.approx(0.5, rel=0.05)


def test_what_has_seen_little_leans_on_what_is_near_it() -> None:
    calibration = Calibration(leans=True)
    calibration.learn(np.full(40, 0.5), [])  # a long run that was wrong from its first token
    assert calibration.correct(np.array([0.36]))[0] < 0.1
    assert calibration.correct(np.array([0.05]))[0] == pytest.approx(0.05, rel=0.6)
    for _ in range(4):
        calibration.learn(np.full(16, 0.9), range(14))
    assert calibration.correct(np.array([0.9]))[0] == pytest.approx(0.87, abs=0.06)


def test_the_end_of_a_long_run_is_less_sure_than_its_beginning() -> None:
    generator, calibration, predicted = np.random.default_rng(0), Calibration(), np.linspace(0.99, 0.97, 64)
    for _ in range(2000):  # each token is right with 0.95 if the one before it was
        right = np.cumprod(generator.random(64) < 0.95)
        calibration.learn(predicted, np.flatnonzero(right).tolist())
    corrected = calibration.correct(predicted)
    for first, last in ((0, 1), (2, 4), (8, 16), (32, 64)):
        expected = np.mean(0.95 ** np.arange(first + 1, last + 1))
        assert corrected[first:last].mean() == pytest.approx(expected, rel=0.1, abs=0.02)


def test_several_drafts_at_once_are_as_one_after_another() -> None:
    generator, together, alone = np.random.default_rng(0), Calibration(), Calibration()
    for _ in range(40):
        drafts = [np.sort(generator.uniform(0.01, 1, size=size))[::-1] for size in (5, 1, 0, 30)]
        taken = [np.flatnonzero(generator.random(len(draft)) < 0.5 * draft).tolist() for draft in drafts]
        together.learn_all(list(zip(drafts, taken, strict=True)))
        for draft, accepted in zip(drafts, taken, strict=True):
            alone.learn(draft, accepted)
    one_by_one = np.concatenate([together.correct(draft) for draft in drafts])
    np.testing.assert_allclose(together.correct_all(drafts), one_by_one, rtol=1e-12)
    np.testing.assert_allclose(together.correct_all(drafts), alone.correct_all(drafts), rtol=0.02)


@pytest.mark.parametrize("share", [0.3, 1.0, 1.5])
def test_what_must_be_predicted_for_a_probability_is_what_is_corrected_to_it(share: float) -> None:
    generator, calibration = np.random.default_rng(0), Calibration()
    assert calibration.predicted(0.0) == 0.0
    for _ in range(2000):
        predicted = np.sort(generator.uniform(0.02, 0.6, size=20))[::-1]
        calibration.learn(predicted, np.flatnonzero(generator.random(20) < share * predicted).tolist())
    for wanted in (0.25, 0.1, 0.03):
        assert calibration.predicted(wanted) == pytest.approx(min(wanted / share, 1), rel=0.2)
    below = calibration.predicted(0.2) * np.linspace(0.99, 0.01, 50)
    assert (calibration.correct(below) < 0.22).all()
