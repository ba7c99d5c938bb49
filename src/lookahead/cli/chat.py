"""`lookahead chat`: a conversation on the terminal or through a pipe, whose turns share one cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from lookahead.backends.loading import LoadedModel, summary
from lookahead.backends.session import open_session
from lookahead.backends.transformers.cache_names import CACHE, knows_its_length
from lookahead.cli.generate import (
    PromptInput,
    Recording,
    decode_with_lookahead,
    fitted,
    run_report,
    seed_draws,
    text_options,
    traced,
)
from lookahead.cli.loading import load_for_decoding
from lookahead.cli.settings import ChatSettings
from lookahead.cli.signals import ERROR, INTERRUPTED, OK, end_requested, handling
from lookahead.cli.terminal import Consoles, StepPrinter, checked, counts_line, decode, print_json, stdin_is
from lookahead.core.sequence import common_start
from lookahead.drafting import NGramPool
from lookahead.errors import InvalidArgumentError, LookaheadError
from lookahead.text import conversation_text
from lookahead.values import decoded, read_text

MARKER = "> "

HELP = """\
/reset  forget the conversation; learned drafts stay, they save steps and never change the text
/help   print this
/exit   end, as Ctrl-D does
A line that begins with / is a command, one that begins with a space never is.
Ctrl-C stops an answer after the step under way, a second one at once; at the prompt it ends the chat."""


def run(settings: ChatSettings, consoles: Consoles) -> int:
    """Answer turns until the input ends, and return the exit code."""
    template = read_template(settings)
    loaded = load_for_decoding(settings, consoles.notes)
    turns = choose_format(settings, template, loaded, consoles.notes)
    seed_draws(loaded, settings.sampling_seed)
    with traced(settings, loaded, consoles.notes) as config:
        conversation = Conversation(loaded, turns, replace(settings, config=config))
        return Chat(consoles, conversation, settings.json).run()


class Chat:
    """Loop that reads turns and commands, and prints answers; with `json` each turn as one JSON object.

    With typed input, an error is printed and the next turn is read. With piped input, an error also sets the exit code,
    and Ctrl-C ends the chat.
    """

    def __init__(self, consoles: Consoles, conversation: Conversation, json: bool) -> None:
        self._consoles, self._conversation, self._json = consoles, conversation, json

    def run(self) -> int:
        """Handle each line of input, and return the exit code."""
        code, types = OK, stdin_is(typed=True)
        if types:
            self._note(f"chat with {self._conversation.name}; /help lists the commands, Ctrl-D ends")
        for line in typed_lines(self._consoles, marker_on_out=not self._json) if types else piped_lines():
            if line == "/exit":
                break
            code = max(code, self._take(line))
            if end_requested():
                return INTERRUPTED
            if code == INTERRUPTED and not types:
                break
        return OK if types else code

    def _take(self, line: str | InvalidArgumentError) -> int:
        try:
            if isinstance(line, InvalidArgumentError):
                raise line
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                return self._turn(line)
        except LookaheadError as error:
            message = " ".join(str(error).split())
            self._consoles.notes.print(f"error: {message}")
            if self._json and not (isinstance(line, str) and line.startswith("/")):
                prompt = line if isinstance(line, str) else None
                print_json(self._consoles.out, {"prompt": prompt, "error": message})
            return ERROR
        return OK

    def _command(self, command: str) -> None:
        if command == "/reset":
            self._conversation.reset()
            self._note("the conversation is forgotten")
        elif command == "/help":
            self._note(HELP)
        else:
            raise InvalidArgumentError(
                f"{command} is not a command; /help lists the commands, a leading space sends the line as a turn"
            )

    def _turn(self, text: str) -> int:
        prompt = self._conversation.prompt(text)
        if self._json:
            answer = self._conversation.answer(prompt)
            print_json(self._consoles.out, self._conversation.report(prompt, answer))
        else:
            printer = StepPrinter(self._consoles.out, self._conversation.tokenizer)
            answer = self._conversation.answer(prompt, printer.step)
            printer.finish()
            self._note(self._conversation.line(prompt, answer))
        return INTERRUPTED if answer.interrupted else OK

    def _note(self, text: str) -> None:
        self._consoles.notes.print(text, style="dim")


def typed_lines(consoles: Consoles, *, marker_on_out: bool) -> Iterator[str | InvalidArgumentError]:
    """Yield lines from the keyboard, or the error of a line that is not valid UTF-8.

    The marker is printed on standard output if `marker_on_out` is set and it is a terminal, else on standard error.
    """
    with suppress(ImportError):  # missing on some systems; `input` uses it once it is imported
        import readline  # noqa: F401
    while True:
        try:
            if marker_on_out and consoles.out.is_terminal:
                line = input(MARKER)
            else:
                consoles.notes.print(MARKER, end="")
                line = input()
            yield _without_end(checked(line, "the line"))
        except EOFError:
            consoles.notes.print()  # end the line of the marker
            return
        except KeyboardInterrupt:
            consoles.notes.print()
            raise
        except (UnicodeDecodeError, InvalidArgumentError):
            yield InvalidArgumentError("the line is not valid UTF-8; write it in UTF-8")


def piped_lines() -> Iterator[str | InvalidArgumentError]:
    """Yield lines from a pipe or a file, or the error of a line that is not valid UTF-8."""
    if sys.stdin is None or sys.stdin.closed:
        return
    for number, content in enumerate(sys.stdin.buffer, start=1):
        try:
            yield _without_end(decoded(content, f"line {number} of standard input"))
        except InvalidArgumentError as error:
            yield error


def _without_end(line: str) -> str:
    """Line without its line ending; a command also without surrounding white space."""
    line = line.removesuffix("\n").removesuffix("\r")
    return line.strip() if line.startswith("/") else line


@dataclass(frozen=True)
class Reply:
    """Answer of the model in one turn.

    Attributes:
        text: Text of the answer, without special tokens.
        recording: Steps and times of the decoding.
        prefilled_tokens: Number of prompt tokens that were computed, and not taken from the cache.
        interrupted: Whether Ctrl-C stopped the answer; `text` may then be incomplete.
        cut: Limit that ended the answer: `max_new_tokens` or the model's context. `None` if the model ended it.
    """

    text: str
    recording: Recording
    prefilled_tokens: int
    interrupted: bool
    cut: Literal["max_new_tokens", "context"] | None


class Conversation:
    """Conversation with one model. Turns share the cache and the learned drafts.

    Each turn encodes the whole conversation again, as a template may change the text of earlier turns. The cache is
    reused up to the first token that differs.

    Attributes:
        name: Title of the model.
        messages: Messages so far.
        cached: Tokens with keys and values in the cache.
    """

    def __init__(self, loaded: LoadedModel, turns: TurnFormat, settings: ChatSettings) -> None:
        self.name, self.tokenizer = loaded.title, loaded.tokenizer
        self._loaded, self._turns = loaded, turns
        self._config, self._max_new_tokens, self._system = settings.config, settings.max_new_tokens, settings.system
        self._options = text_options(loaded, settings) | {"use_cache": True}
        if self._config.preset == "paper":
            self._options["ngram_pool"] = NGramPool(self._config.ngram_size, self._config.guess_set_size)
        self._session = open_session(loaded.model)
        self._session.keep_text()
        self._cache: Cache | None = None
        self.cached: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system message. Learned drafts stay, as they never change the text."""
        self.messages: list[Message] = [] if self._system is None else [_turn("system", self._system)]
        self._forget_cache()

    def prompt(self, text: str) -> PromptInput:
        """Encode the conversation with a new turn `text`, as input for the model.

        Raises:
            InvalidArgumentError: The context has no room for an answer. The conversation stays unchanged.
        """
        input_ids = self._turns.encode([*self.messages, _turn("user", text)])
        what = "with this turn the conversation has"
        advice = "the turn was not sent; write a shorter one, or start over with /reset"
        return fitted(self._loaded, text, input_ids, self._max_new_tokens, what, advice)

    def answer(self, prompt: PromptInput, on_step: Callable[[list[int]], None] | None = None) -> Reply:
        """Let the model answer; `on_step` is called with the tokens of every step.

        Ctrl-C ends the answer after the current step, a second Ctrl-C at once. An incomplete answer stays in the
        conversation. After an answer without tokens, or an error, the turn is removed.
        """
        ids: list[int] = prompt.input_ids[0].tolist()
        reused = self._crop(ids)
        options = self._options if self._cache is None else self._options | {CACHE: self._cache}
        recording, interruption = Recording(on_step), Interruption()
        with handling(signal.SIGINT, interruption.on_signal):
            try:
                criteria = StoppingCriteriaList([interruption])
                output = decode_with_lookahead(
                    self._loaded, prompt, self._config, recording, stopping_criteria=criteria, **options
                )
                cache = getattr(output, CACHE)
                self._cache = cache if knows_its_length(cache) else None
                self.cached = (
                    [] if self._cache is None else (ids + recording.tokens)[:-1]
                )  # the last token was not read
            except KeyboardInterrupt:  # the call leaves the cache unchanged
                interruption.requested = True
        reused = self._session.reused_tokens(reused)
        text = decode(self.tokenizer, recording.tokens)
        if recording.tokens:
            self.messages += [_turn("user", prompt.text), _turn("assistant", text)]
        return Reply(text, recording, len(ids) - reused, interruption.requested, self._cut(prompt, recording.tokens))

    def report(self, prompt: PromptInput, answer: Reply) -> dict[str, Any]:
        """Report of a turn, as plain numbers and lists."""
        return run_report(self.tokenizer, answer.recording) | {
            "prompt": prompt.text,
            "prompt_tokens": prompt.input_ids.shape[1],
            "prefilled_tokens": answer.prefilled_tokens,
            "max_new_tokens": prompt.max_new_tokens,
            "cut": answer.cut,
            "interrupted": answer.interrupted,
        }

    def line(self, prompt: PromptInput, answer: Reply) -> str:
        """Line of statistics about a turn."""
        recording = answer.recording
        if answer.interrupted and not recording.tokens:
            return "interrupted before the first token; the turn is removed"
        line = counts_line(recording.statistics.tokens, recording.statistics.steps, recording.wall_seconds)
        line += f", {answer.prefilled_tokens} tokens prefilled"
        if answer.cut == "max_new_tokens":
            line += f"; cut at --max-new-tokens {prompt.max_new_tokens}"
        elif answer.cut == "context":
            context = self._loaded.context_length
            line += f"; cut at the end of the model's context of {context} tokens, /reset starts over"
        return f"interrupted: {line}" if answer.interrupted else line

    def _cut(self, prompt: PromptInput, tokens: Sequence[int]) -> Literal["max_new_tokens", "context"] | None:
        ends = self._loaded.model.generation_config.eos_token_id
        if len(tokens) < prompt.max_new_tokens or tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            return None
        return "max_new_tokens" if prompt.max_new_tokens == self._max_new_tokens else "context"

    def _crop(self, ids: Sequence[int]) -> int:
        """Crop the cache to its common prefix with `ids`, and return the length of the prefix.

        The cache is dropped if it cannot be cropped, or if a new prefill would give other values.
        """
        reused = common_start(self.cached, ids[:-1])  # the last token is always computed, for its logits
        limit = self._loaded.fixed_positions
        if self._cache is not None and reused < len(self.cached):
            try:
                self._cache.crop(reused - len(self.cached))
            except (ValueError, RuntimeError):  # layers with a window or a state cannot be cropped
                reused = 0
        if reused == 0 or (limit is not None and max(len(ids), len(self.cached)) > limit):
            self._forget_cache()
        self.cached = self.cached[:reused]
        return len(self.cached)

    def _forget_cache(self) -> None:
        self._cache, self.cached = None, []


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class Interruption(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that a signal sets: generation ends between two tokens, with a regular output and cache."""

    def __init__(self) -> None:
        self.requested = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Request a stop; the second request raises `KeyboardInterrupt`."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each row ends here, `[rows]`."""
        return torch.full((len(input_ids),), self.requested, dtype=torch.bool)  # on the CPU, to avoid a device sync


Message = Mapping[str, str]
"""Message of one side: `role` ("system", "user" or "assistant") and `content`."""


@dataclass(frozen=True)
class TurnFormat:
    """Format of a conversation as one text.

    Attributes:
        tokenizer: The model's tokenizer.
        template: Chat template in Jinja, `None` for the tokenizer's own.
        plain: Use no template: every turn begins on a new line, and the model continues the text.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    plain: bool = False

    def encode(self, messages: Sequence[Message]) -> torch.Tensor:
        """Encode a conversation as tokens `[1, S]`, up to the start of the model's next answer.

        Raises:
            InvalidArgumentError: The template raises an error.
        """
        if self.plain:
            text = conversation_text((message["role"], message["content"]) for message in messages)
        else:
            try:
                text = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=self.template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception as error:  # templates raise any error, for example to refuse a system message
                raise InvalidArgumentError(f"the chat template fails: {summary(error)}") from error
        encoded: Any = self.tokenizer(text, add_special_tokens=self.plain, return_tensors="pt", verbose=False)
        return encoded["input_ids"]  # type: ignore[no-any-return]


def read_template(settings: ChatSettings) -> str | None:
    """Read the template that the settings name, `None` if they name none."""
    if settings.template is None:
        return None
    if settings.raw:
        raise InvalidArgumentError(
            f"--raw uses no template, but --template {settings.template} names one; choose one of the two"
        )
    return read_text(settings.template, "the template from --template")


def choose_format(settings: ChatSettings, template: str | None, loaded: LoadedModel, notes: Console) -> TurnFormat:
    """Choose the format by the settings, and try it on a first turn."""
    plain = settings.raw
    if settings.model is None:
        notes.print(
            "note: no --model was given, so the demonstration model is used; it is a small model of Python code: it "
            "continues code, it does not answer questions"
        )
        plain = plain or template is None
    if not (plain or template or loaded.tokenizer.chat_template):
        raise InvalidArgumentError(
            f"--model {settings.model}: the tokenizer has no chat template; give a Jinja template with --template "
            "FILE, or send turns as plain text with --raw"
        )
    turns, question = TurnFormat(loaded.tokenizer, template, plain), _turn("user", "Hello")
    if settings.system is None:
        turns.encode([question])
        return turns
    both = turns.encode([_turn("system", checked(settings.system, "the text of --system")), question])
    with suppress(InvalidArgumentError):  # a template may insist on a system message
        if settings.system and torch.equal(both, turns.encode([question])):
            notes.print("note: the chat template ignores the message of --system")
    return turns
