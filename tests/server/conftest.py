"""A server process with a chat model, shared by all tests of the folder."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from lookahead.demo import demo_model_path
from server_process import ServerProcess

KEY = "a-key"

TEMPLATE = (
    "{{ greeting or '' }}"
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if tools %}# tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the servers' logs to a failure: they name errors, and the tokens of answers that are not JSON."""
    report = yield
    if report.failed:
        for process in ServerProcess.running:
            report.sections.append((f"log of the server at {process.url}", "".join(process.lines[-20:])))
    return report


@pytest.fixture(scope="session")
def chat_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    path = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(demo_model_path(), path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="session")
def server(chat_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A running server with small limits and an API key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"another-key\n{KEY}\n")
    # Longer than clients keep idle connections (5 s), or the server could close one just as a request arrives.
    limits = ["--max-rows", "8", "--queue", "56", "--max-body-bytes", "300000", "--read-timeout", "8"]
    options = ["--dtype", "float32", "--step-budget", "16", *limits]
    with ServerProcess("--model", chat_model_path, "--api-key-file", keys, *options) as process:
        yield process
        _end_in_the_middle(process)


def _end_in_the_middle(process: ServerProcess) -> None:
    """Signal the server during an answer, which must still be complete."""
    client = OpenAI(base_url=f"{process.url}/v1", api_key=KEY, max_retries=0, timeout=600)
    stream = client.completions.create(model="chatty", prompt="x", max_tokens=40, temperature=0, stream=True)
    next(iter(stream))
    process.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason is not None
    assert process.process.wait(600) == 0
    assert "Traceback" not in (log := "".join(process.lines)), log


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> OpenAI:
    """OpenAI's client, connected to the server."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=600)


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """A plain HTTP client, for requests that OpenAI's client does not make."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=600) as made:
        yield made
