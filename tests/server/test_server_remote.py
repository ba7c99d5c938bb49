"""`generate` and `chat` with a server: the same texts as with the model itself."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lookahead.cli import main
from lookahead.cli.rendering import TextPrinter
from server_process import ServerProcess

PROMPT = "def add(a, b):"


@pytest.fixture
def connection(server: ServerProcess, tmp_path: Path) -> list[str]:
    (tmp_path / "key").write_text("a-key\n")
    return ["--server", server.url, "--api-key-file", str(tmp_path / "key"), "--max-new-tokens", "12"]


def reference(demo: Any, text: str) -> str:
    model, tokenizer = demo
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    ids_after = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(ids_after[0, ids.shape[1] :], skip_special_tokens=True)


def test_generate_prints_the_servers_text_and_counts(
    connection: list[str], demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *connection, PROMPT]) == 0
    said = capsys.readouterr()
    assert said.out == reference(demo, PROMPT) + "\n"
    assert "12 tokens in" in said.err
    assert main(["generate", *connection, "--json", "--preset", "autoregressive", PROMPT]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["steps"], report["tokens"]) == (reference(demo, PROMPT), 12, 12)


def test_chat_keeps_turns_until_reset(
    connection: list[str], demo: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(f"{PROMPT}\nagain\n/reset\n{PROMPT}\n/exit\nnever\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["chat", *connection, "--json"]) == 0
    first, second, third = (json.loads(line)["text"] for line in capsys.readouterr().out.splitlines())
    turn = f"# user\n{PROMPT}\n# assistant\n"
    assert first == third == reference(demo, turn)
    assert second == reference(demo, f"{turn}{first}\n# user\nagain\n# assistant\n")


def test_chat_commands_work_with_a_server(
    connection: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/help\n/nothing\n")))
    assert main(["chat", *connection]) == 2  # for /nothing
    said = capsys.readouterr()
    assert said.out == ""
    assert all(f"\n{command} " in f"\n{said.err}" for command in ("/reset", "/help", "/exit"))
    assert "error: /nothing is no command; /help lists them" in said.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "float16"], "--dtype"),
        (["-W", "3"], "--preset and --step-budget"),
        (["--memory", "./m.bin"], "--preset and --step-budget"),
        (["--max-new-tokens", "99999"], "max_tokens=99999"),
        (["--server", "http://127.0.0.1:1"], "cannot be reached"),
        (["--server", "ftp://x"], "http://"),
    ],
)
def test_options_that_a_server_cannot_meet_are_refused(
    connection: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *connection, *options, PROMPT]) == 2
    assert said in capsys.readouterr().err


def test_what_is_piped_is_the_text_itself() -> None:
    """As of a model here: terminals alone get colours, and pictures of control characters."""
    out = io.StringIO()
    printer = TextPrinter(Console(file=out, soft_wrap=True))
    for text in ("if x:\n\treturn", "", "\r\x1b[0m"):
        printer.show(text)
    printer.finish()
    assert out.getvalue() == "if x:\n\treturn\r\x1b[0m\n"
