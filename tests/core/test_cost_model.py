"""The cost model: what it learns from steps, what it says about sizes it never saw, and where it is kept."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lookahead.core.cost_model as cost_model
from lookahead import InvalidArgumentError
from lookahead.backends.transformers.cost_store import CostStore, StoredCost, default_folder, describe_setting
from lookahead.backends.transformers.first_guess import first_guess
from lookahead.backends.transformers.json_file import user_cache
from lookahead.core.cost_model import GRID, MEMORY, TRUST, CostModel, bucket, isotonic
from model_zoo import build, in_type

SIZES = np.arange(1, 257)


def true_time(nodes: Any, context: int = 300) -> Any:
    """A step that is flat to six nodes, then rises; attention grows with both."""
    return 0.05 * (1 + 0.02 * np.maximum(0, np.asarray(nodes) - 6)) + 1e-6 * context * (5 + 0.2 * np.asarray(nodes))


def watched(cost: CostModel, sizes: list[int], steps: int, *, outliers: float = 0.0, seed: int = 0) -> CostModel:
    """`cost` after steps of random sizes with 3 % of noise; a share of them took ten times as long."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        size = int(random.choice(sizes))
        slow = 10 if random.random() < outliers else 1
        cost.observe(size, 300, float(true_time(size)) * random.lognormal(0, 0.03) * slow)
    return cost


# observations


def test_learns_a_curve_through_noise_and_outliers() -> None:
    sizes = [1, 4, 8, 16, 32, 64, 128]
    cost = watched(CostModel.prior(), sizes, 600, outliers=0.1)
    for size in sizes:
        assert cost.step_time(size, 300) == pytest.approx(float(true_time(size)), rel=0.08), size
        assert cost.relative(size, 300) == pytest.approx(float(true_time(size) / true_time(1)), rel=0.08), size
    for between in (6, 12, 24, 48, 96):
        assert cost.relative(between, 300) == pytest.approx(float(true_time(between) / true_time(1)), rel=0.15)


def test_times_rise_with_nodes_and_context() -> None:
    random = np.random.default_rng(1)
    cost = CostModel.fit([(n, c, float(true_time(n, c))) for n in (1, 4, 16, 64) for c in (128, 2048)])
    for _ in range(200):
        cost.observe(int(random.integers(1, 300)), int(random.integers(4000)), float(random.lognormal(-3, 2)))
        times = cost.step_time(SIZES, 500)
        assert (np.diff(times) >= -1e-12).all()
        assert (times > 0).all()
        assert (cost.step_time(SIZES, 600) >= times).all()


def test_one_bad_step_does_not_condemn_a_size() -> None:
    cost = watched(CostModel.prior(), [1, 8, 32], 100)
    before = cost.relative(16, 300)
    cost.observe(16, 300, 10 * float(true_time(16)))
    assert cost.relative(16, 300) < 4 * before
    for _ in range(3):
        cost.observe(16, 300, float(true_time(16)))
    assert cost.relative(16, 300) == pytest.approx(float(true_time(16) / true_time(1)), rel=0.15)


def test_sizes_beyond_those_seen_are_not_thought_slower_than_a_line() -> None:
    cost = CostModel.prior()
    for _ in range(2 * TRUST):  # many rows, of which each costs far more than another node
        cost.observe(64, 100, 0.070)
        cost.observe(256, 100, 0.085)
    slope = 0.015 / 192
    assert cost.step_time(512, 100) == pytest.approx(0.085 + slope * 256, rel=0.02)
    assert cost.step_time(1024, 100) > cost.step_time(512, 100) > cost.step_time(256, 100)
    for _ in range(2 * TRUST):
        cost.observe(512, 100, 0.2)
    assert cost.step_time(512, 100) == pytest.approx(0.2, rel=0.02), "what is seen counts"


def test_follows_a_machine_that_becomes_slower() -> None:
    cost = watched(CostModel.prior(), [1, 8, 32, 64], 200)
    before = cost.relative(64, 300)
    for _ in range(100):  # twice as slow, and no large steps for a while
        cost.observe(1, 300, 2 * float(true_time(1)))
        cost.observe(8, 300, 2 * float(true_time(8)))
    assert cost.step_time(1, 300) == pytest.approx(2 * float(true_time(1)), rel=0.05)
    assert cost.relative(64, 300) > 0.7 * before, "what was not seen lately must not look cheap beside what was"


def test_follows_a_size_that_changes() -> None:
    cost = watched(CostModel.prior(), [1, 64], 100)
    for _ in range(2 * MEMORY):
        cost.observe(1, 300, float(true_time(1)))
        cost.observe(64, 300, 3 * float(true_time(64)))
    assert cost.relative(64, 300) == pytest.approx(3 * float(true_time(64) / true_time(1)), rel=0.05)


def test_prior_is_flat_at_first_then_rises_gently() -> None:
    prior = CostModel.prior()
    assert not prior.in_seconds
    assert prior.step_time(1, 1000) == 1
    assert prior.relative(8, 1000) < 1.05
    assert 1.05 < prior.relative(16, 1000) < 1.3
    assert 2 < prior.relative(128, 1000) < 4
    assert prior.evidence(16) == 0
    prior.observe(16, 100, 0.5)
    assert prior.in_seconds
    assert prior.step_time(16, 100) == pytest.approx(0.5)
    assert prior.step_time(1, 100) == pytest.approx(0.5 / CostModel.prior().relative(16, 100))


def test_evidence_says_what_was_seen() -> None:
    cost = CostModel.fit([(1, 128, 0.05), (16, 128, 0.06)])
    assert cost.evidence(1) == cost.evidence(16) == TRUST
    assert cost.evidence(64) == 0
    cost.observe(60, 128, 0.1)
    assert cost.evidence(64) == cost.evidence(60) == 1
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        cost.observe(60, 128, seconds)
    assert cost.evidence(64) == 1, "a time that no step can have teaches nothing"


def test_tables_are_built_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = watched(CostModel.prior(), [1, 8, 32], 100)
    cost.step_time(SIZES, 300)
    built = 0

    def counted(*arguments: Any) -> Any:
        nonlocal built
        built += 1
        return isotonic(*arguments)

    monkeypatch.setattr(cost_model, "isotonic", counted)
    for context in range(1000):
        cost.step_time(SIZES, context)
        cost.relative(32, context)
    assert built == 0
    for _ in range(1000):
        cost.observe(8, 300, float(true_time(8)))
    assert built == 0, "observing builds nothing"
    cost.step_time(SIZES, 300)
    assert built <= 2
    built = 0
    for _ in range(200):  # the same again and again settles
        cost.observe(8, 300, float(true_time(8)))
        cost.step_time(SIZES, 300)
    assert built == 0


# measured curves


def test_fit_goes_through_the_points_and_on_beyond_them() -> None:
    contexts, sizes = (128, 512, 2048), (1, 2, 4, 8, 16, 40, 64, 128)
    cost = CostModel.fit([(n, c, float(true_time(n, c))) for n in sizes for c in contexts])
    for context in (0, 128, 1000, 2048, 8000):
        for size in (1, 8, 16, 40, 64, 128):
            assert cost.step_time(size, context) == pytest.approx(float(true_time(size, context)), rel=0.001)
        for beyond in (200, 1000, 4096, 6000):
            assert cost.step_time(beyond, context) == pytest.approx(float(true_time(beyond, context)), rel=0.01)


def test_fit_puts_noise_into_order() -> None:
    cost = CostModel.fit([(1, 128, 0.055), (2, 128, 0.05), (4, 128, 0.051), (8, 128, 0.07)])
    times = cost.step_time(SIZES, 128)
    assert (np.diff(times) >= 0).all()
    assert cost.step_time(1, 128) == pytest.approx(0.052)
    assert cost.step_time(1, 4000) == cost.step_time(1, 128), "one context says nothing about others"


def test_fit_of_few_nodes_takes_the_shape_of_the_prior_beyond_them() -> None:
    prior = CostModel.prior()
    single = CostModel.fit([(4, 128, 0.05)])
    assert single.step_time(4, 128) == pytest.approx(0.05)
    assert single.relative(64, 128) == pytest.approx(prior.relative(64, 128))
    few = CostModel.fit([(1, 128, 0.05), (2, 128, 0.06)])  # is a node worth 20 % of a step, or was that noise?
    assert few.relative(2, 128) == pytest.approx(1.2)
    assert few.relative(64, 128) == pytest.approx(1.2 * prior.relative(64, 128), rel=0.01)


@pytest.mark.parametrize("points", [[], [(0, 1, 1.0)], [(1, -1, 1.0)], [(1, 1, 0.0)], [(1, 1, float("nan"))]])
def test_points_that_no_step_can_have(points: list[Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="points"):
        CostModel.fit(points)


def test_sizes_fall_into_the_nearest_bucket() -> None:
    assert [GRID[bucket(nodes)] for nodes in (1, 5, 16, 19, 20, 60, 10**6)] == [1, 6, 16, 16, 24, 64, GRID[-1]]


def test_isotonic_is_the_nearest_rising_sequence() -> None:
    values, weights = np.array([1.0, 3.0, 2.0, 2.0, 5.0]), np.array([1.0, 2.0, 1.0, 1.0, 1.0])
    assert isotonic(values, weights).tolist() == [1.0, 2.5, 2.5, 2.5, 5.0]


# round trips


def test_round_trip() -> None:
    cost = watched(CostModel.fit([(1, 128, 0.05), (16, 512, 0.07)]), [1, 8, 32], 200)
    again = CostModel.from_dict(json.loads(json.dumps(cost.to_dict())))
    np.testing.assert_allclose(again.step_time(SIZES, 700), cost.step_time(SIZES, 700), rtol=0.01)
    assert [again.evidence(size) for size in GRID] == [cost.evidence(size) for size in GRID]
    prior = CostModel.from_dict(CostModel.prior().to_dict())
    assert not prior.in_seconds


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"knots": [2, 1]},
        {"knots": None},
        {"fixed": [1.0]},
        {"pace": -1.0},
        {"observed": {"7": {"count": 1, "ratios": [1.0]}}},
        {"observed": {"8": {"count": 1, "ratios": []}}},
        {"observed": {"8": {"count": 1, "ratios": [-1.0]}}},
        {"observed": []},
    ],
)
def test_values_that_are_no_cost_model(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        CostModel.from_dict(CostModel.prior().to_dict() | change)


# the store


@pytest.fixture
def stored() -> StoredCost:
    return StoredCost(CostModel.fit([(1, 128, 0.05), (16, 128, 0.06)]), {"date": "2000-01-01"})


def test_store_keeps_settings_apart(tmp_path: Path, stored: StoredCost) -> None:
    store = CostStore(tmp_path / "deep" / "folder")
    llama = build("llama")
    setting = describe_setting(llama)
    assert store.load(setting) is None
    path = store.save(setting, stored)
    assert path == store.path(setting)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing else is left behind"
    found = store.load(describe_setting(llama))
    assert found is not None
    assert found.details == stored.details
    assert found.cost.step_time(16, 128) == pytest.approx(0.06)
    others = [
        describe_setting(build("gpt2")),
        describe_setting(llama, {"pack_weights": True}),
        setting | {"dtype": "bfloat16"},
        setting | {"device": "another processor"},
        setting | {"threads": 99},
        setting | {"attention": "eager"},
        setting | {"versions": {"torch": "0"}},
    ]
    for other in others:
        assert store.load(other) is None
    assert len({store.path(other) for other in [setting, *others]}) == len(others) + 1


def test_setting_names_all_that_a_step_depends_on() -> None:
    setting = describe_setting(build("llama"), {"pack_weights": False})
    assert setting["model"]["class"] == "LlamaForCausalLM"
    assert setting["model"]["hidden_size"] > 0
    assert setting["dtype"] == "float32"
    assert setting["device"]
    assert setting["threads"] == torch.get_num_threads()
    assert setting["engine"] == {"pack_weights": False}
    assert setting["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(setting)) == setting


@pytest.mark.parametrize("content", ["", "{", "[]", '{"setting": {}}', "\x00", '{"setting": {"a": 1}, "cost": {}}'])
def test_corrupt_files_are_ignored_and_named(tmp_path: Path, stored: StoredCost, content: str) -> None:
    store, setting = CostStore(tmp_path), {"a": 1}
    path = store.save(setting, stored)
    path.write_text(content)
    with pytest.warns(UserWarning, match="ignored") as caught:
        assert store.load(setting) is None
    assert str(path) in str(caught[0].message)
    store.save(setting, stored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(setting) is not None


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, stored: StoredCost, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, setting = CostStore(tmp_path), {"a": 1}
    path = store.save(setting, stored)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        store.save(setting, StoredCost(CostModel.prior()))
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(sys.platform != "linux", reason="knows where Linux has it")
def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lookahead.backends.transformers.json_file.user_cache", user_cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (None, "", "relative"):
        if folder is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert default_folder() == tmp_path / ".cache" / "lookahead-decoding" / "cost"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lookahead-decoding" / "cost"
    assert CostStore().folder == default_folder()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_guess_goes_by_how_the_processor_multiplies(dtype: torch.dtype, packs: bool | str) -> None:
    costs = first_guess(in_type("llama", dtype), packs)
    sizes = [costs.relative(nodes, 100) for nodes in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert not costs.in_seconds
    assert sizes[0] == 1.0
    assert sizes == sorted(sizes)
    # Never dearer than a step for each node, and not for free beyond a few rows.
    assert all(1.02 <= cost <= nodes for cost, nodes in zip(sizes[3:], (8, 16, 32, 64, 128, 256), strict=True))


def test_steps_larger_than_any_that_was_guessed_are_learned() -> None:
    model = CostModel((1, 16, 128), (1.0, 1.5, 12.0), (0.0, 0.0, 0.0), pace=None)
    for _ in range(TRUST):
        for nodes in (1, 128, 512, 1024):
            model.observe(nodes, 100, 0.01 + 0.0005 * nodes)
    for nodes in (512, 640, 1024):
        assert model.step_time(nodes, 100) == pytest.approx(0.01 + 0.0005 * nodes, rel=0.05)


def test_a_new_model_takes_after_another_until_it_knows_better() -> None:
    known, other = CostModel.prior(), CostModel.fit([(1, 1, 5.0), (64, 1, 9.0)])
    for _ in range(TRUST):
        for nodes in (8, 16, 64):
            known.observe(nodes, 10, 1.0 + 0.1 * nodes)
    sizes = np.arange(1, 400)
    other.take_after(known)
    np.testing.assert_allclose(other.step_time(sizes, 10), known.step_time(sizes, 10), rtol=1e-6)
    for _ in range(TRUST):
        for nodes in (8, 64):
            other.observe(nodes, 10, 2.0 + 0.1 * nodes)
    own = other.step_time(np.array([8, 64]), 10)
    np.testing.assert_allclose(own, [2.8, 8.4], rtol=0.02)
    other.take_after(known)  # which it does no longer
    np.testing.assert_array_equal(other.step_time(np.array([8, 64]), 10), own)
    assert known.step_time(64, 10) == pytest.approx(7.4, rel=0.02)
