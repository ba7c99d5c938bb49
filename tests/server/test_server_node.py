"""Clients for JavaScript: npm's openai, the AI SDK and LangChain.js. `make test-clients` installs them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_process import ServerProcess

MODULES = Path(__file__).parents[2] / "build" / "node" / "node_modules"
PROMPT = "def add(a, b):"
SCRIPT = Path(__file__).with_name("node_clients.mjs")


@pytest.fixture(scope="module")
def found(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values of all calls, by their names."""
    if shutil.which("node") is None or not MODULES.is_dir():
        pytest.skip("needs node and build/node")
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(MODULES)  # modules are looked up beside the script
    shutil.copy(SCRIPT, folder)
    command = ["node", SCRIPT.name, f"{server.url}/v1", "a-key"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def expected(server: ServerProcess, path: str, **fields: Any) -> str:
    body = {"model": "chatty", "max_tokens": 16, "temperature": 0} | fields
    headers = {"Authorization": "Bearer a-key"}
    choice = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60).json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_node_clients_get_the_text_whole_and_streamed(server: ServerProcess, found: dict[str, Any]) -> None:
    text = expected(server, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}])
    texts = {name: value for name, value in found.items() if name.split()[-1] in ("text", "stream")}
    assert len(texts) == 12
    assert texts == dict.fromkeys(texts, text)
    assert found["openai responses"] == text
    assert found["langchain completion"] == expected(server, "/v1/completions", prompt=PROMPT)


def test_node_clients_get_objects_and_call_functions(found: dict[str, Any]) -> None:
    objects = {name: value for name, value in found.items() if name.split()[-1] in ("object", "tools")}
    assert len(objects) == 13
    assert all(value in ({"city": "Paris"}, {"city": "Rome"}) for value in objects.values()), objects


def test_node_clients_read_that_a_body_is_too_large(found: dict[str, Any]) -> None:
    assert found["openai large body"] == 413
