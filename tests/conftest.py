"""Fixtures and settings of all tests."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

# Before torch is imported: one thread, as in the Makefile, also for a direct call of pytest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torchvision_operators  # noqa: F401

# isort: split
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lookahead.backends.transformers.model_state import STATES
from model_zoo import build


@pytest.fixture(scope="session", autouse=True)
def _usual_signals() -> None:
    """A background job may ignore the signals of a terminal, and its commands would inherit that."""
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _own_kernel_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Torch's own cache ignores `ATEN_CPU_CAPABILITY`, and would load kernels for other capabilities."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))


@pytest.fixture(scope="session", autouse=True)
def _findings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Neither read nor change the findings in the user's cache; use the last of these folders."""
    folders = [tmp_path_factory.mktemp("cache")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookahead.backends.transformers.findings.user_cache", lambda: folders[-1])
        yield folders


@pytest.fixture(scope="session", autouse=True)
def _product_clocks() -> Iterator[list[Callable[[Any], dict[int, tuple[float, float]]]]]:
    """Measurements of this machine decide no test: products of packed weights count as faster; use the last clock."""
    clocks = [lambda layers: dict.fromkeys((1, 2, 4, 8, 16), (2.0, 1.0))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lookahead.backends.transformers.packed_linear.product_seconds", lambda layers: clocks[-1](layers)
        )
        yield clocks


@pytest.fixture(autouse=True)
def _nothing_learned() -> None:
    """Tests share models, but not the memories of earlier calls, which change steps."""
    for state in list(STATES.values()):
        state.memories.clear()


@pytest.fixture(autouse=True)
def _same_verbosity() -> Iterator[None]:
    """Commands silence transformers' log for the whole process, which later tests read."""
    before = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(before)


@pytest.fixture
def own_findings(_findings: list[Path], tmp_path: Path) -> Iterator[Path]:
    """A separate folder of findings for this test."""
    _findings.append(tmp_path)
    yield tmp_path
    _findings.pop()


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that simulates a full disk: this process cannot write to files."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def full() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


@pytest.fixture
def llama() -> PreTrainedModel:
    """A tiny random Llama, shared by all tests; a test that changes it must restore it."""
    return build("llama")


@pytest.fixture
def prompt() -> torch.Tensor:
    """A prompt for zoo models, `[1, 12]`, with repeated short runs."""
    return torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])


@pytest.fixture(scope="session")
def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The demo model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lookahead.demo import demo_model_path

    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    """Compile the drafting loops before the first test that uses them."""
    from lookahead.drafting import compile_loops

    compile_loops()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
