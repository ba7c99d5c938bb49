"""`lookahead chat`: a conversation on the terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lookahead.cli import process
from lookahead.cli.conversation import Answer, Conversation, choose_format, read_template
from lookahead.cli.generate import Prompt, Tracing, run_report, seed_draws
from lookahead.cli.inputs import checked, decoded
from lookahead.cli.loading import LoadedModel, load_for_decoding, quiet_libraries
from lookahead.cli.rendering import Consoles, StepPrinter, print_json
from lookahead.cli.settings import ChatSettings
from lookahead.errors import InvalidArgumentError, LookaheadError

MARKER = "> "

HELP = """\
/reset  forget the conversation; what drafting has learned stays, it saves steps and never changes the text
/help   print this
/exit   end, as Ctrl-D does
A line that begins with / is a command, one that begins with a space never is.
Ctrl-C stops an answer after the step under way, a second one at once; at the prompt it ends the chat."""

UNKNOWN = "{} is no command; /help lists them, and a space before it makes it a turn"


def run(settings: ChatSettings) -> int:
    """Talk until there is nothing more to read, and return the exit code."""
    consoles = Consoles.create(no_color=settings.no_color)
    template = read_template(settings)
    with quiet_libraries():
        loaded = load_for_decoding(settings, consoles.notes)
        turns = choose_format(settings, template, loaded, consoles.notes)
        seed_draws(settings.sampling)
        traced = Tracing(settings.trace, loaded, consoles.notes)
        conversation = Conversation(
            loaded,
            turns,
            traced.config(settings.config),
            settings.max_new_tokens,
            settings.system,
            settings.sampling,
            settings.repetition_penalty,
            settings.stop,
        )
        chat = Chat(consoles, loaded, conversation, settings, traced)
        return chat.by_keyboard() if stdin_is_terminal() else chat.by_pipe()


class Chat:
    """Reads turns and commands, and prints answers.

    Args:
        consoles: Where answers go, and where everything about them goes.
        loaded: The model.
        conversation: Who answers.
        settings: What the user chose.
        traced: Writes down what the turns did.
    """

    def __init__(
        self,
        consoles: Consoles,
        loaded: LoadedModel,
        conversation: Conversation,
        settings: ChatSettings,
        traced: Tracing,
    ) -> None:
        self._consoles = consoles
        self._loaded = loaded
        self._conversation = conversation
        self._settings = settings
        self._traced = traced

    def by_keyboard(self) -> int:
        """Talk with somebody who types: what goes wrong in one turn is shown, and the next turn can put it right."""
        self._note(f"chat with {self._loaded.path.resolve().name}; /help lists the commands, Ctrl-D ends")
        for line in typed_lines(self._consoles, marker_on_out=not self._settings.json):
            if line.strip() == "/exit":
                break
            self._take(line)
        return process.OK

    def by_pipe(self) -> int:
        """Answer every line that comes. Ctrl-C ends all of it; what went wrong on the way shows in the exit code."""
        code = process.OK
        for number, content in piped_lines():
            try:
                line = decoded_line(number, content)
            except InvalidArgumentError as error:
                code = max(code, self._failed(error, {"prompt": None}))
                continue
            if line.strip() == "/exit":
                break
            took = self._take(line)
            if took == process.INTERRUPTED:
                return took
            code = max(code, took)
        return code

    def _take(self, line: str) -> int:
        """Do what a line asks for, and return what would be the exit code if it were the only one."""
        try:
            if line.startswith("/"):
                self._command(line.strip())
            elif line.strip():
                return self._turn(line)
        except LookaheadError as error:
            if line.startswith("/"):
                return self._failed(error)
            return self._failed(error, {"prompt": line})
        return process.OK

    def _failed(self, error: LookaheadError, turn: dict[str, Any] | None = None) -> int:
        """Say what went wrong, in JSON as well if it was a turn, and return the exit code."""
        message = " ".join(str(error).split())
        self._consoles.notes.print(f"error: {message}")
        if self._settings.json and turn is not None:
            print_json(self._consoles.out, turn | {"error": message})
        return process.ERROR

    def _command(self, command: str) -> None:
        if command == "/reset":
            self._conversation.reset()
            self._note("the conversation is forgotten")
        elif command == "/help":
            self._note(HELP)
        else:
            raise InvalidArgumentError(UNKNOWN.format(command))

    def _turn(self, text: str) -> int:
        prompt = self._conversation.prompt(text)
        if self._settings.json:
            answer = self._conversation.answer(prompt)
            print_json(self._consoles.out, turn_report(self._loaded, prompt, answer))
        else:
            printer = StepPrinter(self._consoles.out, self._loaded.tokenizer)
            answer = self._conversation.answer(prompt, printer.step)
            printer.finish()
            self._note(statistics_line(self._loaded, prompt, answer))
        self._traced.write()
        return process.INTERRUPTED if answer.interrupted else process.OK

    def _note(self, text: str) -> None:
        self._consoles.notes.print(text, style="dim")


def turn_report(loaded: LoadedModel, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """One turn as plain numbers and lists."""
    return run_report(loaded.tokenizer, answer.recording) | {
        "prompt": prompt.text,
        "prompt_tokens": prompt.input_ids.shape[1],
        "prefilled_tokens": answer.prefilled_tokens,
        "max_new_tokens": prompt.max_new_tokens,
        "cut": answer.cut,
        "interrupted": answer.interrupted,
    }


def statistics_line(loaded: LoadedModel, prompt: Prompt, answer: Answer) -> str:
    """One line about a turn."""
    recording = answer.recording
    statistics = recording.statistics
    if answer.interrupted and not recording.tokens:
        return "interrupted before the first token; the turn is taken back"
    line = (
        f"{statistics.tokens} tokens in {statistics.steps} steps, step compression {statistics.step_compression:.2f}, "
        f"{recording.tokens_per_second:.1f} tokens/s, {answer.prefilled_tokens} tokens prefilled"
    )
    if answer.cut == "max_new_tokens":
        line += f"; cut at --max-new-tokens {prompt.max_new_tokens}"
    elif answer.cut == "context":
        line += f"; cut where the model's context of {loaded.context_length} tokens ends, /reset begins anew"
    return f"interrupted: {line}" if answer.interrupted else line


def stdin_is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def lines(settings: ChatSettings) -> Iterator[str]:
    """All lines, typed or piped in.

    Raises:
        InvalidArgumentError: One from a pipe is not valid UTF-8.
    """
    if stdin_is_terminal():
        consoles = Consoles.create(no_color=settings.no_color)
        yield from typed_lines(consoles, marker_on_out=not settings.json)
    else:
        yield from (decoded_line(number, content) for number, content in piped_lines())


def typed_lines(consoles: Consoles, *, marker_on_out: bool) -> Iterator[str]:
    """Lines from the keyboard, with a marker before each; where there is `readline` they can be edited.

    Args:
        consoles: Where the marker goes.
        marker_on_out: Whether standard output may show it; otherwise it goes to standard error.
    """
    with suppress(ImportError):  # not everywhere; `input` uses it once it is imported
        import readline  # noqa: F401
    while True:
        try:
            if marker_on_out and consoles.out.is_terminal:
                line = input(MARKER)
            else:
                consoles.notes.print(MARKER, end="")
                line = input()
            line = checked(line, "the line")
        except EOFError:
            consoles.notes.print()  # whatever comes next on the terminal begins on a line of its own
            return
        except KeyboardInterrupt:
            consoles.notes.print()
            raise
        except (UnicodeDecodeError, InvalidArgumentError):
            consoles.notes.print("error: the line is not valid UTF-8; write it in UTF-8")
            continue
        yield line


def piped_lines() -> Iterator[tuple[int, bytes]]:
    """Lines from a pipe or a file as they are, with their numbers from 1."""
    if sys.stdin is None or sys.stdin.closed:
        return
    yield from enumerate(sys.stdin.buffer, start=1)


def decoded_line(number: int, content: bytes) -> str:
    """The text of a line from a pipe, without its end.

    Raises:
        InvalidArgumentError: It is not valid UTF-8.
    """
    return decoded(content, f"line {number} of standard input").removesuffix("\n").removesuffix("\r")
