"""Build the image of the Dockerfile, run a container, and try it: `make test-container`.

    python tools/container.py
    python tools/container.py --engine 'podman --runtime runc' --run='--network host'   # without a daemon
    python tools/container.py --build='--build-arg BASE=debian:bookworm-slim'

The container passes the health check of the image, does not run as root, answers a request and shows the page. It
compiles no loop, ends on SIGTERM with exit code 0, and leaves its memory in the volume.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME, IMAGE = "lookahead-trial", "lookahead:trial"
URL = "http://127.0.0.1:8000"
_PATIENCE = 600
"""Seconds until a container has to be healthy, on a machine that does much else."""


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: their names, and the rest of each on one line."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\s*\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def health_check() -> list[str]:
    """Command of the image's health check."""
    (check,) = (rest for name, rest in dockerfile() if name == "HEALTHCHECK")
    return list(json.loads(check.partition("CMD ")[2]))


class Trial:
    """A container of the image, and the volume that it writes to.

    Args:
        engine: Words of the program: docker, or one that takes the same commands.
        options: Further ones of `run`.
    """

    def __init__(self, engine: Sequence[str], options: Sequence[str]) -> None:
        self._engine, self._options = engine, options

    def build(self, options: Sequence[str]) -> None:
        """Build the image."""
        subprocess.run([*self._engine, "build", "--tag", IMAGE, *options, str(ROOT)], check=True)

    def say(self, *words: str) -> str:
        """Run a command of the engine; its output."""
        done = subprocess.run([*self._engine, *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def start(self) -> float:
        """Start it with a new volume; the seconds until it is healthy."""
        begin = time.monotonic()
        where = ["--volume", f"{NAME}:/data", "--publish", "127.0.0.1:8000:8000"]
        self.say("run", "--detach", "--name", NAME, *where, *self._options, IMAGE)
        while time.monotonic() - begin < _PATIENCE:
            with suppress(RuntimeError):
                self.say("exec", NAME, *health_check())
                return time.monotonic() - begin
            time.sleep(1)
        raise RuntimeError(f"not healthy after {_PATIENCE} s: {self.logs()}")

    def logs(self) -> str:
        """Its output on both streams."""
        done = subprocess.run([*self._engine, "logs", NAME], capture_output=True, text=True)
        return done.stdout + done.stderr

    def stop(self) -> int:
        """Send it SIGTERM; the exit code."""
        self.say("stop", "--time", "120", NAME)
        return int(self.say("inspect", "--format", "{{.State.ExitCode}}", NAME))

    def files(self) -> list[str]:
        """Names of the files in the volume, from a second container."""
        call = ["run", "--rm", "--volume", f"{NAME}:/data", *self._options, "--entrypoint", "ls", IMAGE, "-A", "/data"]
        return self.say(*call).split()

    def remove(self) -> None:
        """Remove container and volume, if there are any; the image stays."""
        for words in (["rm", "--force", NAME], ["volume", "rm", "--force", NAME]):
            with suppress(RuntimeError):
                self.say(*words)


def main() -> int:
    """Build, run and try; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=shlex.split, default=["docker"], help="program with the commands of docker")
    parser.add_argument("--build", type=shlex.split, default=[], help="further options of its `build`")
    parser.add_argument("--run", type=shlex.split, default=[], help="further options of its `run`")
    options = parser.parse_args()
    trial = Trial(options.engine, options.run)
    trial.remove()
    try:
        trial.build(options.build)
        print(f"healthy after {trial.start():.1f} s", flush=True)
        promises = try_container(trial)
    finally:
        trial.remove()
    for what, holds in promises.items():
        print(f"{'ok    ' if holds else 'FAILED'} {what}")
    return int(not all(promises.values()))


def try_container(trial: Trial) -> dict[str, bool]:
    """Whether each promise holds, for a container that is healthy; it is stopped."""
    user = trial.say("exec", NAME, "id", "-u")
    begin = time.monotonic()
    text = complete(URL, "def add(a, b):")
    print(f"first answer after {time.monotonic() - begin:.1f} s: {text!r}")
    with urllib.request.urlopen(URL, timeout=60) as page:
        html = page.read().decode()
    changes = trial.say("container", "diff", NAME).splitlines()
    compiled = [line for line in changes if line.startswith("A ") and ".nbi" in line]
    code = trial.stop()
    return {
        f"user {user} is not root": user != "0",
        "a request is answered": bool(text),
        "the page is served": "<html" in html,
        f"{len(compiled)} loops are compiled": not compiled,
        f"SIGTERM ends it with exit code {code}": code == 0,
        "its memory is in the volume": "demo" in trial.files(),
    }


def complete(url: str, prompt: str) -> str:
    """A completion by the server at `url`."""
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 48, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


if __name__ == "__main__":
    sys.exit(main())
