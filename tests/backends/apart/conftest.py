"""Fixtures of the files that run in separate processes."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lookahead.demo import DEMO_PROMPT, demo_model_path
from simulated_cuda import Simulation, shared_on_cuda, simulated_cuda


@pytest.fixture(scope="session")
def device() -> Iterator[Simulation]:
    """The simulated CUDA device."""
    with simulated_cuda() as simulation:
        yield simulation


@pytest.fixture(scope="session")
def demo_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="session")
def there(device: Simulation, demo_model: PreTrainedModel) -> PreTrainedModel:
    """The demo model on the simulated device."""
    return shared_on_cuda(demo_model)


@pytest.fixture(scope="session")
def demo_prompt() -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)
    ids: torch.Tensor = tokenizer(DEMO_PROMPT, return_tensors="pt").input_ids
    return ids
