"""Trial of grammars in a separate process: preparing one may take minutes and gigabytes, or crash.

A server has `GrammarTrials`. The process, `python -m lookahead.server.grammar_trial`, reads a line of JSON with the
vocabulary, then a line for each grammar, and answers each with a line. Few imports let it start fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from threading import Timer
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

SECONDS = 4
"""Limit of CPU time to prepare a grammar."""

MEBIBYTES = 512
"""Limit of memory to prepare a grammar."""

MAX_CHARACTERS = 2**20
"""Limit of a grammar's length as JSON."""

_WAIT = 60.0
"""Seconds of wall time until a trial is ended; Windows has no limit of CPU time."""

_NICENESS = 10
"""Priority of a trial, in `os.nice` units."""

_TRIAL_TOKENS = 8
"""Tokens that a trial matches."""

LIMITS = LLParserLimits(max_items_in_row=1000, verbose_errors=False)
"""Limits of the parser: its time grows with the square of these items; 128 functions need less than 200."""


class GrammarTrials:
    """Pool of processes that try grammars, one for each concurrent call.

    Args:
        describe: Returns the vocabulary for `tokenizer_from`.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe
        self._idle: deque[subprocess.Popen[str]] = deque()

    def compiled(self, parts: str) -> str:
        """Return a grammar in llguidance's format that can be prepared within the limits.

        Args:
            parts: Grammar as for the function `compiled`.

        Raises:
            ValueError: The grammar is invalid, or takes too much time or memory.
        """
        if len(parts) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(parts)} characters; send at most {MAX_CHARACTERS}")
        process = self._take()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = Timer(_WAIT, process.kill)
        watch.start()
        line = ""
        try:
            with suppress(OSError):  # the process has ended
                process.stdin.write(parts + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            _end(process)
            raise ValueError(f"preparing it takes more than {SECONDS} s or {MEBIBYTES} MiB; make it simpler")
        self._idle.append(process)
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["grammar"]

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            _end(self._idle.pop())

    def _take(self) -> subprocess.Popen[str]:
        with suppress(IndexError):
            return self._idle.pop()
        process = subprocess.Popen(
            [sys.executable, "-m", "lookahead.server.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            cwd=Path(__file__).parents[2],  # the package's parent, so that no module of the user is imported
            start_new_session=True,  # protects it from Ctrl-C; Windows has the flag below
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        assert process.stdin is not None
        with suppress(OSError):  # the process has ended; the first trial fails
            process.stdin.write(json.dumps(self._describe()) + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # unwritten data
            if pipe is not None:
                pipe.close()
    process.wait()


def tokenizer_from(description: dict[str, Any]) -> LLTokenizer:
    """Return llguidance's tokenizer from the description of a vocabulary.

    Args:
        description: `size` of the vocabulary, `ends` (end tokens), and either `fast` (JSON of a fast tokenizer) or
            `bytes` (each token in hexadecimal digits) with `special` (ids of special tokens).
    """
    size, ends = description["size"], description["ends"]
    if "fast" in description:
        return LLTokenizer(description["fast"], n_vocab=size, eos_token=ends or None)
    tokens = list(map(bytes.fromhex, description["bytes"]))
    return LLTokenizer(TokenizerWrapper(_Bytes(tokens, ends, description["special"])), n_vocab=size)


class _Bytes:
    """Tokenizer over bytes. It splits texts greedily: trials need no particular split."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: Sequence[int], special: Sequence[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, min(ends), special
        self._ids = {token: number for number, token in enumerate(tokens) if token}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes) -> list[int]:
        ids = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), start + 1)
            ids += [number] if (number := self._ids.get(text[start:end])) is not None else []
            start = end
        return ids


def compiled(parts: str, tokenizer: LLTokenizer) -> str:
    """Convert a grammar to llguidance's format, parse it, and follow it for some tokens.

    Args:
        parts: JSON with llguidance's list `grammars`. An element may have a `regex`, a `choice` of texts or a `grammar`
            (Lark or GBNF) instead.
        tokenizer: Vocabulary of the model.

    Raises:
        Exception: The grammar is invalid.
    """
    grammars = [part if part.keys() <= _READY else _converted(part) for part in json.loads(parts)["grammars"]]
    grammar = json.dumps({"grammars": grammars})
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for _ in range(_TRIAL_TOKENS):
        allowed = bytearray(matcher.compute_logit_bias())
        for end in tokenizer.eos_tokens:
            allowed[end] = 0
        if matcher.is_stopped() or not any(allowed):
            break
        matcher.consume_token(next(token for token, bias in enumerate(allowed) if bias))
    if matcher.is_error():
        raise ValueError(error_message(matcher))
    return grammar


def error_message(matcher: LLMatcher) -> str:
    """Return the error of a failed matcher in one line."""
    message = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())[:500]
    return "a rule refers to itself without any text in between" if message == "NoExtensionBias" else message


_READY = {"name", "lark_grammar", "json_schema"}


def _converted(part: dict[str, Any]) -> dict[str, Any]:
    if "regex" in part:
        form: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(part["regex"]))["grammars"][0]
    elif "choice" in part:
        form = {"lark_grammar": grammar_from("choice", json.dumps(part["choice"], ensure_ascii=False))}
    else:
        form = {"lark_grammar": grammar_from("grammar", part["grammar"])}
    return form | {"name": part["name"]}


def main() -> None:
    """Try grammars from standard input until it ends."""
    tokenizer = tokenizer_from(json.loads(sys.stdin.readline()))
    limit = _limiter()
    for line in sys.stdin:
        limit()
        try:
            answer = {"grammar": compiled(line, tokenizer)}
        except BaseException as error:  # panics of the parser are not `Exception`s
            answer = {"error": str(error)[:500]}
        print(json.dumps(answer), flush=True)


def _limiter() -> Callable[[], None]:
    """Limit the memory of this process, and return a function that limits the CPU time of the next grammar."""
    try:
        import resource
    except ImportError:  # Windows
        return lambda: None
    os.nice(_NICENESS)
    with suppress(OSError, ValueError):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEBIBYTES * 2**20,) * 2)

    def limit() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(used.ru_utime + used.ru_stime) + SECONDS, hard))

    return limit


if __name__ == "__main__":
    main()
