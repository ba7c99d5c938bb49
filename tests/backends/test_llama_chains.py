"""Recurrent and hybrid models with single-path drafts in llama.cpp, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from gguf_files import REASON, hybrid_file, mamba_file
from lookahead import LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.serving import Engine

pytest.importorskip("llama_cpp", reason=REASON)

from lookahead.backends.llama_cpp import checks
from lookahead.backends.llama_cpp.context import LlamaContext
from lookahead.backends.llama_cpp.file import LlamaModel

pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = torch.tensor([[5, 11, 7, 3, 13, 2, 5, 11, 7, 3]])


@pytest.fixture(scope="module", params=[mamba_file, hybrid_file], ids=["recurrent", "hybrid"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PreTrainedModel]:
    """The model in llama.cpp and in transformers."""
    write: Callable[[Path], PreTrainedModel] = request.param
    path = tmp_path_factory.mktemp("states") / "model.gguf"
    reference = write(path)
    model = lookahead.load_gguf(path)
    model.generation_config.eos_token_id = None
    return model, reference


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LookaheadConfig(), {}),
        (LookaheadConfig(step_budget=8), {}),
        (LookaheadConfig(step_budget=24, memory="process"), {}),
        (LookaheadConfig(preset="jacobi", block_size=5), {}),
        (LookaheadConfig(preset="autoregressive"), {}),
        (LookaheadConfig(step_budget=8), {"do_sample": True, "temperature": 0.8, "top_p": 0.9}),
    ],
    ids=["auto", "fixed", "long", "jacobi", "plain", "sampled"],
)
def test_texts_equal_transformers(
    both: tuple[Any, PreTrainedModel], config: LookaheadConfig, options: dict[str, Any]
) -> None:
    model, reference = both
    options = {"max_new_tokens": 60, "do_sample": False} | options
    torch.manual_seed(3)
    expected = reference.generate(PROMPT, **options)
    torch.manual_seed(3)
    plain = model.generate(PROMPT, **options)
    for _ in range(2):  # in the second round drafts are better, and wrong at other indices
        torch.manual_seed(3)
        output = lookahead.generate(model, PROMPT, lookahead_config=config, return_dict_in_generate=True, **options)
        assert output.sequences.tolist() == plain.tolist() == expected.tolist()
    if config.step_budget == 24:
        assert output.statistics.step_compression > 1.3


def test_rows_are_read_plainly(both: tuple[Any, PreTrainedModel]) -> None:
    model, reference = both
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert model.generate(ids, **options).tolist() == reference.generate(ids, **options).tolist()
    with pytest.raises(UnsupportedArgumentError, match="2 rows.*running state"):
        lookahead.generate(model, ids, **options)


def test_a_kept_text_is_continued(both: tuple[Any, PreTrainedModel]) -> None:
    """llama.cpp's state is reused only if the prompt continues its text."""
    model, reference = both
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    model.keeps_text = True
    try:
        first = lookahead.generate(model, PROMPT, **options)
        longer = torch.cat([first, PROMPT[:, :3]], dim=1)
        for ids, reuses in ((longer, True), (longer[:, :-6], False)):
            expected = reference.generate(ids, **options).tolist()
            assert lookahead.generate(model, ids, **options).tolist() == expected
            assert (model.reused_tokens > 0) == reuses
    finally:
        model.keeps_text = False


def test_options_that_need_trees_are_refused(both: tuple[Any, PreTrainedModel]) -> None:
    model, _ = both
    with pytest.raises(UnsupportedArgumentError, match="preset='paper'"):
        lookahead.generate(model, PROMPT, lookahead_config=LookaheadConfig(preset="paper"), max_new_tokens=4)
    with pytest.raises(UnsupportedModelError, match="running state.*Engine"):
        Engine(model)


class MixedUp(LlamaContext):
    """Only logits of single-path drafts are wrong: nodes are mixed up."""

    def run(self, *counts: int) -> Any:
        return np.roll(super().run(*counts), 1, axis=0)


def test_the_check_notices_wrong_logits(both: tuple[Any, PreTrainedModel]) -> None:
    llama = both[0].llama
    assert checks.largest_difference(llama) < 1e-3
    wrong = LlamaModel(llama.path, n_gpu_layers=0, threads=1)
    wrong.release(MixedUp(wrong, 2000, 2))  # the next caller gets it
    with pytest.raises(UnsupportedModelError, match="other logits on chains of tokens"):
        checks.check_model(wrong)
