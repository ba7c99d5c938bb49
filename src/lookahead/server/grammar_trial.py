"""Trying grammars in a process of its own: preparing one may take minutes and gigabytes, or crash, and no thread can be
ended.

A server has `GrammarTrials`. The process, `python -m lookahead.server.grammar_trial`, reads a line of JSON that
describes the tokens, then a line for each grammar, which it answers with a line. It imports little, to start at once.
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
"""CPU time that preparing a grammar may take."""

MEBIBYTES = 512
"""Memory that it may take."""

MOST_CHARACTERS = 2**20
"""Of a grammar, as JSON."""

_WAIT = 60.0
"""Seconds of the clock after which a trial ends, also where a process cannot limit its own CPU time."""

_NICENESS = 10

_TRIED_TOKENS = 8

LIMITS = LLParserLimits(max_items_in_row=1000, verbose_errors=False)
"""Of the parser. A token of an ambiguous grammar takes the square of these items; 128 functions need less than 200."""


class GrammarTrials:
    """Processes that try grammars. Each takes one at a time; there are as many as threads have called at once.

    Args:
        describe: Returns what `described_tokenizer` reads.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe
        self._idle: deque[subprocess.Popen[str]] = deque()

    def compiled(self, parts: str) -> str:
        """A grammar in llguidance's form, which takes a bounded time to prepare.

        Args:
            parts: See `compiled`.

        Raises:
            ValueError: It is no grammar, or takes too much time or memory.
        """
        if len(parts) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(parts)} characters; the most is {MOST_CHARACTERS}")
        process = self._take()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = Timer(_WAIT, process.kill)
        watch.start()
        said = ""
        try:
            with suppress(OSError):  # it has ended
                process.stdin.write(parts + "\n")
                process.stdin.flush()
                said = process.stdout.readline()
        finally:
            watch.cancel()
        if not said:
            _end(process)
            raise ValueError(f"preparing it takes more than {SECONDS} s or {MEBIBYTES} MiB; make it simpler")
        self._idle.append(process)
        answer: dict[str, str] = json.loads(said)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["grammar"]

    def close(self) -> None:
        """End the processes that try nothing."""
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
            cwd=Path(__file__).parents[2],  # where this package is, and no module of the user's
            start_new_session=True,  # Ctrl-C is for the server; Windows has a flag for that
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, which the first trial finds out
            process.stdin.write(json.dumps(self._describe()) + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what could not be written
            if pipe is not None:
                pipe.close()
    process.wait()


def described_tokenizer(tokens: dict[str, Any]) -> LLTokenizer:
    """The tokens of a model as grammars see them.

    Args:
        tokens: `size` of the vocabulary and `ends`, the tokens that end an answer; `fast`, the JSON of a fast
            tokenizer, or `bytes` of each token in hexadecimal digits with those that are `special`.
    """
    if "fast" in tokens:
        return LLTokenizer(tokens["fast"], n_vocab=tokens["size"], eos_token=tokens["ends"] or None)
    wrapped = TokenizerWrapper(_Bytes(list(map(bytes.fromhex, tokens["bytes"])), tokens["ends"], tokens["special"]))
    return LLTokenizer(wrapped, n_vocab=tokens["size"])


class _Bytes:
    """Tokens by their bytes. A text is split greedily, which costs as much to follow as any other way."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: Sequence[int], special: Sequence[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, min(ends), special
        self._ids = {token: number for number, token in enumerate(tokens) if token}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            ends = range(min(place + self._longest, len(text)), place, -1)
            end = next((end for end in ends if text[place:end] in self._ids), place + 1)
            ids += [number] if (number := self._ids.get(text[place:end])) is not None else []
            place = end
        return ids


def compiled(parts: str, tokenizer: LLTokenizer) -> str:
    """A grammar in llguidance's form, once it has been read and followed for some tokens.

    Args:
        parts: JSON with the `grammars` of llguidance's form. One may have a `regex`, a `choice` of texts, or a
            `grammar` (Lark or GBNF) instead.

    Raises:
        Exception: It is none.
    """
    grammars = [part if part.keys() <= _READY else _converted(part) for part in json.loads(parts)["grammars"]]
    grammar = json.dumps({"grammars": grammars})
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for _ in range(_TRIED_TOKENS):
        allowed = bytearray(matcher.compute_logit_bias())
        for end in tokenizer.eos_tokens:
            allowed[end] = 0
        if matcher.is_stopped() or not any(allowed):
            break
        matcher.consume_token(next(token for token, bias in enumerate(allowed) if bias))
    if matcher.is_error():
        raise ValueError(failure(matcher))
    return grammar


def failure(matcher: LLMatcher) -> str:
    """What a matcher says that has failed."""
    said = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())[:500]
    return "it refers to itself, with nothing in between" if said == "NoExtensionBias" else said


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
    """Try one grammar after another, until there are no more."""
    tokenizer = described_tokenizer(json.loads(sys.stdin.readline()))
    limit = _limiter()
    for line in sys.stdin:
        limit()
        try:
            answer = {"grammar": compiled(line, tokenizer)}
        except BaseException as error:  # the parser's panics are no `Exception`
            answer = {"error": str(error)[:500]}
        print(json.dumps(answer), flush=True)


def _limiter() -> Callable[[], None]:
    """What has this process ended by the system if it takes more than a grammar may from now on."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return lambda: None
    os.nice(_NICENESS)
    with suppress(OSError, ValueError):
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEBIBYTES * 2**20,) * 2)

    def limit() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(used.ru_utime + used.ru_stime) + SECONDS, hard))

    return limit


if __name__ == "__main__":
    main()
