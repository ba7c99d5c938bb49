"""`--model` with names of the Hub, from a local Hub; `HF_HOME` is a temporary folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from hub_server import Hub, Repository, folder_files, hub_server
from lookahead.demo import demo_model_path

pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = "def add(a, b):"
OPTIONS = ["-n", "12", "--device", "cpu", "--dtype", "float32", "--json"]

EACH = """
import contextlib, io, json, os, sys
from lookahead.cli import main, program
lines, answers = sys.stdin, sys.stdout
if len(sys.argv) > 1:
    import lookahead.api.call, lookahead.cli.generate
    if not os.fork():  # commands on terminals begin in a process that has run no other
        lines, answers = open(int(sys.argv[1])), open(int(sys.argv[2]), "w")
sys.stdin = open(os.devnull)
for line in lines:
    terminal, arguments = json.loads(line)
    sys.argv = ["lookahead", *arguments]
    if not terminal:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            answer = main(), out.getvalue(), err.getvalue()
    elif child := os.fork():
        answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "", ""
    else:
        import fcntl, termios
        os.setsid()
        fcntl.ioctl(there := os.open(terminal, os.O_RDWR), termios.TIOCSCTTY, 0)
        for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            os.dup2(there, number)
            setattr(sys, name, open(number, mode, closefd=False))
        program()
    print(json.dumps(answer), flush=True, file=answers)
with contextlib.suppress(ChildProcessError):
    os.wait()
os._exit(0)  # the normal exit of torch takes seconds
"""

MODULE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


class Commands:
    """Run commands in one process, which imports torch once, and those on a terminal in forks of it."""

    def __init__(self, has_terminals: bool = False, **environment: str) -> None:
        variables = {**os.environ, "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
        (its_lines, lines), (answers, its_answers) = os.pipe(), os.pipe()
        passed = [its_lines, its_answers] if has_terminals else []
        self._process = subprocess.Popen(
            [sys.executable, "-c", EACH, *map(str, passed)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=passed,
        )
        os.close(its_lines)
        os.close(its_answers)
        self._of_terminals = open(lines, "w"), open(answers)  # noqa: SIM115  # closed below

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors of a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(["", arguments]), file=self._process.stdin, flush=True)
        code, out, err = json.loads(self._process.stdout.readline())
        return code, out, err

    def on_a_terminal(self, model: str, until: bytes, typed: bytes = b"", code: int = 130) -> bytes:
        """Return the terminal output of a command up to the text `until`; with code 130, Ctrl-C then ends it."""
        pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, b"\x20\x00\x60\x00\x00\x00\x00\x00")
        os.write(ours, typed)
        lines, answers = self._of_terminals
        print(json.dumps([os.ttyname(its), ["generate", PROMPT, "--model", model]]), file=lines, flush=True)
        output = b""
        while until not in output:
            output += os.read(ours, 1 << 16)
        os.close(its)
        if code == 130:
            os.write(ours, b"\x03")
        with suppress(OSError):  # at the end
            while os.read(ours, 1 << 16):
                pass
        os.close(ours)
        assert json.loads(answers.readline())[0] == code
        return output

    def refused(self, *arguments: str) -> str:
        """Return the error line of a command that must be refused."""
        code, out, err = self.run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("error: ")
        return err

    def report(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON of a command that must print nothing else."""
        code, out, err = self.run(*arguments)
        assert (code, err) == (0, "")
        report: dict[str, Any] = json.loads(out)
        return report

    def close(self) -> None:
        for file in self._of_terminals:
            file.close()
        self._process.communicate()


def torch_bytes(weights: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a repository's code creates when it runs."""
    return tmp_path_factory.mktemp("marker") / "has-run"


@pytest.fixture(scope="module")
def hub(marker: Path) -> Iterator[Hub]:
    """A Hub with the demo model in many kinds of repositories."""
    demo = {name: content for name, content in folder_files(demo_model_path()).items() if name != "README.md"}
    weights = load_file(demo_model_path() / "model.safetensors")
    config, small = json.loads(demo["config.json"]), {**demo}
    del small["model.safetensors"]
    names = sorted(weights)
    parts = {f"part-{number}.safetensors": names[number::2] for number in range(2)}
    index = {"metadata": {}, "weight_map": {name: part for part, held in parts.items() for name in held}}
    shards = {part: save({name: weights[name] for name in held}, {"format": "pt"}) for part, held in parts.items()}
    needless = dict.fromkeys(("consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "code.py"), b"x")
    own = {"model_type": "own", "architectures": ["OwnModel"]}
    own["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    ggufs = ["small-Q8_0.gguf", "small-Q4_K_M.gguf", "mmproj-small.gguf"]
    ggufs += [f"F16/small-F16-{part:05}-of-00002.gguf" for part in (1, 2)]
    repositories = {
        "tiny/shards": Repository(
            {**small, **shards, **needless, "model.safetensors.index.json": json.dumps(index).encode()}
        ),
        "tiny/shards@short": Repository(
            {**demo, "config.json": json.dumps({**config, "max_position_embeddings": 16}).encode()}, ("short",)
        ),
        "tiny/slow": Repository(demo, pause=0.05),
        "tiny/breaks": Repository(demo, breaks=1),
        "tiny/gated": Repository(demo, gated=True),
        "tiny/pickles": Repository({**small, "pytorch_model.bin": torch_bytes(weights)}),
        "tiny/own": Repository(
            {
                **demo,
                "config.json": json.dumps({**config, **own}).encode(),
                "own.py": MODULE.format(marker=str(marker)).encode(),
            }
        ),
        "tiny/gguf": Repository({name: b"GGUF" + name.encode() for name in (*ggufs, "README.md")}),
        "tiny/one-gguf": Repository({"only-Q8_0.gguf": b"GGUF", "config.json": b"{}"}),
        "tiny/other-gguf": Repository({"only-Q8_0.gguf": b"GGUF"}),
        "tiny/empty": Repository({"README.md": b"Later."}),
    }
    repositories["tiny/once"] = repositories["tiny/shards"]
    repositories["tiny/choice"] = repositories["tiny/gguf"]
    with hub_server(repositories) as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def commands(hub: Hub, home: str) -> Iterator[Commands]:
    """Commands that use the local Hub."""
    running = Commands(has_terminals=hasattr(os, "fork"), HF_ENDPOINT=hub.url, HF_HOME=home)
    yield running
    running.close()


@pytest.fixture(scope="module")
def expected(demo: tuple[PreTrainedModel, Any]) -> str:
    """Text of `model.generate`."""
    model, tokenizer = demo
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def files_asked(hub: Hub) -> set[str]:
    """Return the files requested since the last call."""
    names = {path.partition("/resolve/")[2].partition("/")[2] for path in hub.requested if "/resolve/" in path}
    hub.requested.clear()
    return names


def test_only_needed_files_are_downloaded_and_only_once(hub: Hub, commands: Commands, expected: str) -> None:
    files_asked(hub)
    for needed in (
        {
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json"),
            *("model.safetensors.index.json", "part-0.safetensors", "part-1.safetensors"),
        },
        set(),
    ):
        report = commands.report("generate", PROMPT, "--model", "tiny/once", *OPTIONS)
        assert report["text"] == expected
        assert report["model"] == f"tiny/once@{hub.repositories['tiny/once'].commit}"
        requests = len(hub.requested)
        assert files_asked(hub) == needed
    assert requests == 1, "only for the latest commit"


def test_a_revision_is_another_model(hub: Hub, commands: Commands) -> None:
    for revision in ("short", hub.repositories["tiny/shards@short"].commit):
        result = commands.run("generate", PROMPT, "--model", "tiny/shards", "--revision", revision, *OPTIONS)
        report = json.loads(result[1])
        assert report["prompt_tokens"] + len(report["tokens"]) == 16, result
        assert report["model"].endswith(hub.repositories["tiny/shards@short"].commit)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (["tiny/nothing"], "--model tiny/nothing: no such folder, and no such model at http"),
        (["nothing"], "--model nothing: no such folder, and no such model at http"),
        (["tiny--x/nothing"], "no such folder, and no repository can have this name"),
        (["tiny/shards", "--revision", "v9"], "--revision v9: http"),
        (["tiny/gated"], "--model tiny/gated: access has to be requested"),
        (["tiny/empty"], "has no weights that transformers loads"),
        (["tiny/pickles"], "its weights are pickles (pytorch_model.bin)"),
        ([str(demo_model_path()), "--revision", "main"], "is a local path; leave it out"),
        (["./tiny/shards"], "no such folder; give the path of a local model folder, or a name of the Hub"),
        (["none.gguf"], "--model none.gguf: no such file"),
        (["./" + "x" * 3000], "File name too long: " + "x" * 100 + "...; choose a shorter one"),
        (["tiny/gguf"], "several GGUF files; name one as tiny/gguf:FILE (F16/small-F16-00001-of-00002.gguf, small-Q4"),
        (["tiny/gguf:Q5"], "no GGUF file matches 'Q5'"),
        (["tiny/gguf:small"], "several files match 'small'"),
        (["tiny/gguf:README.md"], "no GGUF file matches 'README.md'"),
        (["tiny/shards:Q4"], "has no GGUF file"),
        (["tiny/other-gguf", "--trust-remote-code"], "--trust-remote-code applies to transformers models only"),
    ],
)
def test_models_that_cannot_be_downloaded_are_refused_in_one_line(
    commands: Commands, model: list[str], words: str
) -> None:
    assert words in commands.refused("generate", PROMPT, "--model", *model)


@pytest.mark.parametrize("command", ["compare", "trace", "chat", "batch", "serve", "tune", "warm-up"])
def test_every_command_takes_names(commands: Commands, tmp_path: Path, command: str) -> None:
    prompts = [str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "out")] if command == "batch" else []
    message = commands.refused(command, *prompts, "--model", "tiny/nothing", "--revision", "main")
    assert "no such model at http" in message


def test_after_a_download_that_broke_off_the_rest_is_downloaded(
    hub: Hub, commands: Commands, home: str, expected: str
) -> None:
    repository = hub.repositories["tiny/breaks"]
    message = commands.refused("generate", PROMPT, "--model", "tiny/breaks")
    assert "--model tiny/breaks: the download failed (" in message
    assert "503" in message
    repository.down = False
    downloaded = {path.name for path in Path(home).glob("hub/models--tiny--breaks/snapshots/*/*")}
    files_asked(hub)
    assert commands.report("generate", PROMPT, "--model", "tiny/breaks", *OPTIONS)["text"] == expected
    assert files_asked(hub) == repository.files.keys() - downloaded


@pytest.mark.slow_by_nature("starts commands anew, offline")
def test_offline_the_cache_is_enough(hub: Hub, commands: Commands, home: str, expected: str) -> None:
    commands.report("generate", PROMPT, "--model", "tiny/shards", *OPTIONS)
    offline = Commands(HF_ENDPOINT=hub.url, HF_HOME=home, HF_HUB_OFFLINE="1")
    hub.requested.clear()
    assert offline.report("generate", PROMPT, "--model", "tiny/shards", *OPTIONS)["text"] == expected
    for name in ("tiny/slow", "tiny/gated"):
        assert f"--model {name}: HF_HUB_OFFLINE is set, and the cache {home}" in offline.refused("chat", "-m", name)
    assert hub.requested == []
    offline.close()


def test_a_hub_that_does_not_answer_is_named(home: str) -> None:
    alone = Commands(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=home)
    assert "http://127.0.0.1:9 does not answer (Connect" in alone.refused("chat", "--model", "tiny/slow")
    alone.close()


def test_code_of_a_repository_runs_where_it_is_trusted(
    hub: Hub, commands: Commands, marker: Path, expected: str
) -> None:
    files_asked(hub)
    message = commands.refused("generate", PROMPT, "--model", "tiny/own", *OPTIONS)
    assert "made of Python code that comes with it; read that code" in message
    assert "own.py" not in files_asked(hub)
    assert not marker.exists()
    report = commands.report("generate", PROMPT, "--model", "tiny/own", "--trust-remote-code", *OPTIONS)
    assert report["text"] == expected
    assert marker.exists()


def test_pickles_are_read_where_they_are_allowed(hub: Hub, commands: Commands, expected: str, tmp_path: Path) -> None:
    files_asked(hub)
    commands.refused("generate", PROMPT, "--model", "tiny/pickles", *OPTIONS)
    assert files_asked(hub) == set()
    for name, content in hub.repositories["tiny/pickles"].files.items():
        (tmp_path / name).write_bytes(content)
    assert f"--model {tmp_path}: its weights are pickles" in commands.refused("chat", "--model", str(tmp_path))
    for model in ("tiny/pickles", str(tmp_path)):
        assert commands.report("generate", PROMPT, "-m", model, "--allow-pickle", *OPTIONS)["text"] == expected


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("tiny/gguf:small-Q8_0.gguf", {"small-Q8_0.gguf"}),
        ("tiny/gguf:q4_k_m", {"small-Q4_K_M.gguf"}),
        ("tiny/gguf:F16", {f"F16/small-F16-{part:05}-of-00002.gguf" for part in (1, 2)}),
        ("tiny/one-gguf", {"only-Q8_0.gguf"}),
    ],
)
def test_a_gguf_file_is_named_by_its_name_or_a_part_of_it(
    hub: Hub, commands: Commands, name: str, files: set[str]
) -> None:
    files_asked(hub)
    message = commands.refused("generate", PROMPT, "--model", name)  # the file holds no model
    assert f"--model {name}: " in message or "llama-cpp-python" in message
    assert files_asked(hub) == files


def test_a_terminal_shows_how_far_a_download_is(commands: Commands) -> None:
    output = commands.on_a_terminal("tiny/slow", until=b"B/s]")
    assert b"downloading: " in output
    assert b"files" not in output


def test_a_terminal_offers_gguf_files_to_choose_from(hub: Hub, commands: Commands) -> None:
    files_asked(hub)
    output = commands.on_a_terminal("tiny/choice", until=b"loading the model", typed=b"2\n")
    assert b"  1  F16/small-F16-00001-of-00002.gguf" in output
    assert b"  2  small-Q4_K_M.gguf" in output
    assert b"mmproj" not in output
    assert files_asked(hub) == {"small-Q4_K_M.gguf"}


def test_no_choice_is_a_refusal(commands: Commands) -> None:
    output = commands.on_a_terminal("tiny/gguf", until=b"several GGUF files", typed=b"\x04", code=2)
    assert b"error: --model tiny/gguf: " in output
