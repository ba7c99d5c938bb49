"""`lookahead chat`: a conversation on the terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from lookahead.cli import process, signals
from lookahead.cli.conversation import Conversation, choose_format, read_template
from lookahead.cli.generate import seed_draws, traced
from lookahead.cli.inputs import checked, decoded, stdin_is
from lookahead.cli.loading import load_for_decoding
from lookahead.cli.rendering import Consoles, StepPrinter, print_json
from lookahead.cli.settings import ChatSettings
from lookahead.errors import InvalidArgumentError, LookaheadError

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
    seed_draws(settings)
    with traced(settings, loaded, consoles.notes) as config:
        conversation = Conversation(loaded, turns, replace(settings, config=config))
        return Chat(consoles, conversation, settings.json).run()


class Chat:
    """Loop that reads turns and commands, and prints answers.

    With typed input, an error is printed and the next turn is read. With piped input, an error also sets the exit code,
    and Ctrl-C ends the chat.

    Args:
        consoles: Consoles for answers and for notes.
        conversation: Conversation that answers the turns.
        json: Print each turn as one JSON object.
    """

    def __init__(self, consoles: Consoles, conversation: Conversation, json: bool) -> None:
        self._consoles, self._conversation, self._json = consoles, conversation, json

    def run(self) -> int:
        """Handle each line of input, and return the exit code."""
        code, types = process.OK, stdin_is(typed=True)
        if types:
            self._note(f"chat with {self._conversation.name}; /help lists the commands, Ctrl-D ends")
        for line in typed_lines(self._consoles, marker_on_out=not self._json) if types else piped_lines():
            if line == "/exit":
                break
            code = max(code, self._take(line))
            if signals.end_requested():
                return signals.INTERRUPTED
            if code == signals.INTERRUPTED and not types:
                break
        return process.OK if types else code

    def _take(self, line: str | InvalidArgumentError) -> int:
        """Handle one line, and return its exit code."""
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
            return process.ERROR
        return process.OK

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
        return signals.INTERRUPTED if answer.interrupted else process.OK

    def _note(self, text: str) -> None:
        self._consoles.notes.print(text, style="dim")


def typed_lines(consoles: Consoles, *, marker_on_out: bool) -> Iterator[str | InvalidArgumentError]:
    """Yield lines from the keyboard, or the error of a line that is not valid UTF-8.

    Lines can be edited if `readline` is available. The prompt marker is printed on standard output if `marker_on_out`
    is set and it is a terminal, else on standard error.
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
