"""The Dockerfile and the compose files, without building an image (`make test-container` builds one)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from container import complete, dockerfile, health_check
from server_process import ServerProcess

ROOT = Path(__file__).parents[2]
STEPS = dockerfile()


def _of(name: str) -> list[str]:
    return [rest for step, rest in STEPS if step == name]


def _arguments() -> list[str]:
    """Return the arguments of `lookahead` in the entry point and the default command."""
    (entry,), (command,) = _of("ENTRYPOINT"), _of("CMD")
    words = [*json.loads(entry), *json.loads(command)]
    assert words[:2] == ["lookahead", "serve"]
    return words[2:]


def _compose(path: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / path).read_text(encoding="utf-8")))


def test_copied_files_exist_and_are_not_ignored() -> None:
    included = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"
    }
    copied = {source for rest in _of("COPY") for source in rest.split()[:-1]}
    assert copied == included
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_server_runs_as_a_user_and_all_that_is_installed_is_not_that_users() -> None:
    names = [name for name, _ in STEPS]
    (user,) = _of("USER")
    assert f"useradd --uid 1000 --create-home {user}" in _of("RUN")[0]
    installs = [number for number, (name, rest) in enumerate(STEPS) if name == "RUN" and " install " in rest]
    assert max(installs) < names.index("USER") < names.index("ENTRYPOINT")


def test_a_server_with_the_options_of_the_image_is_healthy_and_keeps_its_memory(tmp_path: Path) -> None:
    options = [word.replace("/data", str(tmp_path)) for word in _arguments()]
    program, *rest = health_check()
    assert program == "python"
    with ServerProcess(*options) as server:
        port = server.url.rpartition(":")[2]
        check = [sys.executable, *(word.replace(":8000", f":{port}") for word in rest)]
        assert subprocess.run(check, capture_output=True).returncode == 0
        assert complete(server.url, "def add(a, b):")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert subprocess.run(check, capture_output=True).returncode == 1
    assert (tmp_path / "demo").exists()


@pytest.mark.parametrize("path", ["compose.yaml", "examples/balanced/compose.yaml"])
def test_a_compose_file_fits_the_image(path: str) -> None:
    compose = _compose(path)
    server = compose["services"]["server"]
    (volume,) = _of("VOLUME")
    named, _, place = server["volumes"][0].partition(":")
    assert (named in compose["volumes"], place) == (True, volume)
    assert {f"{name}=" for name in server["build"]["args"]} <= {re.split(r"(?<==)", rest)[0] for rest in _of("ARG")}
    assert server["command"] == "${OPTIONS:-" + " ".join(json.loads(_of("CMD")[0])) + "}"
    assert (ROOT / path).parent.joinpath(server["build"]["context"], "Dockerfile").exists()


def test_the_ports_match_the_image_and_the_balancer() -> None:
    (port,) = _of("EXPOSE")
    assert _compose("compose.yaml")["services"]["server"]["ports"] == [f"127.0.0.1:8000:{port}"]
    balancer = (ROOT / "examples/balanced/nginx.conf").read_text(encoding="utf-8")
    assert f"server server:{port} " in balancer
    (listens,) = re.findall(r"listen (\d+);", balancer)
    services = _compose("examples/balanced/compose.yaml")["services"]
    assert services["balancer"]["ports"] == [f"127.0.0.1:{listens}:{listens}"]


@pytest.mark.parametrize("arguments", ["", "--build-arg TORCH=cu130", "--build-arg EXTRA='ray[serve]'"])
def test_build_commands_in_the_dockerfile_name_its_arguments(arguments: str) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"docker build --tag lookahead {arguments}".strip() in text
    named = re.findall(r"--build-arg (\w+)=", arguments)
    assert all(f"\nARG {name}=" in text for name in named)
