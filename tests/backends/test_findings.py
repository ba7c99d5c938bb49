"""Findings of trials for invariant passes are stored for later processes, and used only if nothing has changed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import lookahead
import model_zoo
from lookahead import LookaheadConfig
from lookahead.backends.transformers import comparisons, findings, invariant
from lookahead.backends.transformers.invariant import MAX_ROWS, RowRule

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14]])


class Tries:
    """Count the trials and replace them by fixed results; other tests run them."""

    def __init__(self, patch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
        self._forget = forget
        self.counts = {"find_rule": 0, "check_invariance": 0}
        for module, name, result in (
            (invariant, "find_rule", RowRule(2, MAX_ROWS)),
            (comparisons, "check_invariance", True),
        ):
            patch.setattr(module, name, self._counting(name, result))

    def _counting(self, name: str, result: object) -> Any:
        def counting(*_: Any) -> Any:
            self.counts[name] += 1
            return result

        return counting

    def of_a_new_process(self, model: PreTrainedModel | None = None) -> tuple[dict[str, int], torch.Tensor]:
        """Simulate the first call in a process; return the counts of trials, and the text."""
        self._forget()
        self.counts.update(dict.fromkeys(self.counts, 0))
        fresh = model or make()
        config = LookaheadConfig(invariant=True, step_budget=8)
        text = lookahead.generate(fresh, PROMPT, lookahead_config=config, max_new_tokens=2, do_sample=False)
        return dict(self.counts), text


def make() -> PreTrainedModel:
    return copy.deepcopy(model_zoo.in_type("llama", torch.bfloat16))


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch, own_findings: Path) -> Iterator[Tries]:
    rules = invariant._rules
    kept = dict(rules)
    yield Tries(monkeypatch, rules.clear)
    rules.clear()
    rules.update(kept)


def test_a_second_process_tries_nothing(tries: Tries) -> None:
    first, text = tries.of_a_new_process()
    assert first["find_rule"] > 2
    assert first["check_invariance"] == 1
    second, again = tries.of_a_new_process()
    assert second == {"find_rule": 0, "check_invariance": 0}
    assert torch.equal(text, again)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"setting": {}, "found": [2, 128]}'])
def test_files_that_are_something_else_are_written_anew(tries: Tries, content: str, tmp_path: Path) -> None:
    first, _ = tries.of_a_new_process()
    files = sorted(tmp_path.rglob("*.json"))
    assert len(files) == first["find_rule"] + 1
    whole = [file.read_text() for file in files]
    for file in files:
        file.write_text(content)
    assert tries.of_a_new_process()[0] == first
    assert [file.read_text() for file in files] == whole


def test_rules_that_there_are_not_are_not_believed(tries: Tries, tmp_path: Path) -> None:
    first, _ = tries.of_a_new_process()
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text().replace('"found": [2, 128]', '"found": [0, 0]'))
    assert tries.of_a_new_process()[0]["find_rule"] == first["find_rule"]


def test_another_machine_finds_its_own(tries: Tries, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = tries.of_a_new_process()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert tries.of_a_new_process()[0] == first


def test_where_nothing_can_be_kept_it_is_found_again(
    tries: Tries, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    with full_disk():
        first, _ = tries.of_a_new_process()
        assert tries.of_a_new_process()[0] == first


def test_code_that_may_change_is_checked_by_each_process(tries: Tries) -> None:
    class Llama(LlamaForCausalLM):
        pass

    for _ in range(2):
        model = make()
        model.__class__ = Llama
        assert tries.of_a_new_process(model)[0]["check_invariance"] == 1
    assert findings.architecture(make()) is not None
    hooked = make()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    assert findings.architecture(hooked) is None
    other = make()
    other.config.rms_norm_eps = 0.5
    assert findings.architecture(other) != findings.architecture(make())
