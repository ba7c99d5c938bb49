"""A conversation with a model: what was said, how it becomes the model's input, and what need not be computed again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from lookahead.backends.loading import LoadedModel, summary
from lookahead.backends.session import open_session
from lookahead.backends.transformers.cache_names import CACHE, knows_its_length
from lookahead.cli import signals
from lookahead.cli.generate import Prompt, Recording, decode_with_lookahead, fitted, run_report, text_options
from lookahead.cli.inputs import checked, read_text
from lookahead.cli.rendering import counts_line, decode
from lookahead.cli.settings import ChatSettings
from lookahead.core.sequence import common_start
from lookahead.drafting import NGramPool
from lookahead.errors import InvalidArgumentError
from lookahead.text import conversation_text


@dataclass(frozen=True)
class Answer:
    """What the model answered in one turn.

    Attributes:
        text: The answer, without special tokens.
        recording: What decoding it did.
        prefilled_tokens: Tokens of the conversation that had to be computed before the answer.
        interrupted: Whether it was stopped by Ctrl-C, so that `text` may be a part of an answer.
        cut: What ended it before the model did: the most tokens of an answer, or the end of the model's context.
    """

    text: str
    recording: Recording
    prefilled_tokens: int
    interrupted: bool
    cut: Literal["max_new_tokens", "context"] | None


class Conversation:
    """Turns with one model. The cache and what drafting has learned stay from one turn to the next.

    The input of a turn is always the whole conversation, written down anew: a template may change what it wrote
    before. The cache goes on from the tokens that are the same as then.

    Args:
        turns: How turns become tokens.
        settings: What is told before the first turn, and how answers are made.

    Attributes:
        name: Of the model's folder.
        messages: What was said so far.
        cached: The tokens whose keys and values the cache holds.
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
        """Forget what was said. What drafting has learned stays: it saves steps, and cannot change what is said."""
        self.messages: list[Message] = [] if self._system is None else [_turn("system", self._system)]
        self._forget_cache()

    def prompt(self, text: str) -> Prompt:
        """The model's input for a turn that says `text`.

        Raises:
            InvalidArgumentError: There is no room for an answer. The conversation is as it was.
        """
        input_ids = self._turns.encode([*self.messages, _turn("user", text)])
        what = "with this turn the conversation has"
        advice = "the turn was not sent; write a shorter one, or begin anew with /reset"
        return fitted(self._loaded, text, input_ids, self._max_new_tokens, what, advice)

    def answer(self, prompt: Prompt, on_step: Callable[[list[int]], None] | None = None) -> Answer:
        """Let the model answer; `on_step` gets the tokens of every step.

        Ctrl-C ends the answer after the token under way, a second one at once; what there is of it stays in the
        conversation, unless there is nothing: then the turn is taken back, as it is if anything goes wrong.
        """
        ids: list[int] = prompt.input_ids[0].tolist()
        kept = self._crop(ids)
        options = self._options if self._cache is None else self._options | {CACHE: self._cache}
        recording, interruption = Recording(on_step), Interruption()
        with signals.handling(signal.SIGINT, interruption.on_signal):
            try:
                criteria = StoppingCriteriaList([interruption])
                output = decode_with_lookahead(
                    self._loaded, prompt, self._config, recording, stopping_criteria=criteria, **options
                )
                cache = getattr(output, CACHE)
                self._cache = cache if knows_its_length(cache) else None
                self.cached = [] if self._cache is None else (ids + recording.tokens)[:-1]  # the last was never read
            except KeyboardInterrupt:  # nobody waited for the step; the call has left the cache as it was
                interruption.asked = True
        kept = self._session.reused_tokens(kept)
        said = decode(self.tokenizer, recording.tokens)
        if recording.tokens:
            self.messages += [_turn("user", prompt.text), _turn("assistant", said)]
        return Answer(said, recording, len(ids) - kept, interruption.asked, self._cut(prompt, recording.tokens))

    def report(self, prompt: Prompt, answer: Answer) -> dict[str, Any]:
        """All of a turn, as plain numbers and lists."""
        return run_report(self.tokenizer, answer.recording) | {
            "prompt": prompt.text,
            "prompt_tokens": prompt.input_ids.shape[1],
            "prefilled_tokens": answer.prefilled_tokens,
            "max_new_tokens": prompt.max_new_tokens,
            "cut": answer.cut,
            "interrupted": answer.interrupted,
        }

    def line(self, prompt: Prompt, answer: Answer) -> str:
        """One line about a turn."""
        recording = answer.recording
        if answer.interrupted and not recording.tokens:
            return "interrupted: no token came, and the turn is taken back"
        line = counts_line(recording.statistics.tokens, recording.statistics.steps, recording.wall_seconds)
        line += f", {answer.prefilled_tokens} tokens prefilled"
        if answer.cut == "max_new_tokens":
            line += f"; cut at --max-new-tokens {prompt.max_new_tokens}"
        elif answer.cut == "context":
            context = self._loaded.context_length
            line += f"; cut where the model's context of {context} tokens ends, /reset begins anew"
        return f"interrupted: {line}" if answer.interrupted else line

    def _cut(self, prompt: Prompt, tokens: Sequence[int]) -> Literal["max_new_tokens", "context"] | None:
        ends = self._loaded.model.generation_config.eos_token_id
        if len(tokens) < prompt.max_new_tokens or tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            return None
        return "max_new_tokens" if prompt.max_new_tokens == self._max_new_tokens else "context"

    def _crop(self, ids: Sequence[int]) -> int:
        """Crop the cache to what begins `ids`, as computing all of it anew would give it; returns the tokens kept."""
        kept = common_start(self.cached, ids[:-1])  # the last token is always computed, to see what follows it
        limit = self._loaded.fixed_positions
        if self._cache is not None and kept < len(self.cached):
            try:
                self._cache.crop(kept - len(self.cached))
            except (ValueError, RuntimeError):  # a layer with a window, or a state, has no way back
                kept = 0
        if kept == 0 or (limit is not None and max(len(ids), len(self.cached)) > limit):
            self._forget_cache()
        self.cached = self.cached[:kept]
        return len(self.cached)

    def _forget_cache(self) -> None:
        self._cache, self.cached = None, []


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


class Interruption(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that is met once somebody asks.

    Stopping in this way ends generation between two tokens, with an output and a cache like those of any other end.

    Attributes:
        asked: Whether generation should stop.
    """

    def __init__(self) -> None:
        self.asked = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask for a stop. A second time nobody waits for it.

        Raises:
            KeyboardInterrupt: It is the second time.
        """
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each row ends here, `[rows]`."""
        return torch.full((len(input_ids),), self.asked, dtype=torch.bool)  # on the CPU: nobody waits for a device


Message = Mapping[str, str]
"""What one side said: `role` ("system", "user" or "assistant") and `content`."""


@dataclass(frozen=True)
class TurnFormat:
    """How a conversation is written as one text.

    Attributes:
        tokenizer: The model's tokenizer.
        template: A chat template in Jinja, `None` for the tokenizer's own.
        plain: Use no template: every turn begins on a new line, and the model goes on right where the text ends.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    plain: bool = False

    def encode(self, messages: Sequence[Message]) -> torch.Tensor:
        """Tokens `[1, S]` of a conversation, up to where the model's next answer begins.

        Raises:
            InvalidArgumentError: The template refuses it.
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
            except Exception as error:  # templates raise what they like, to refuse a system message for example
                raise InvalidArgumentError(f"the chat template fails: {summary(error)}") from error
        encoded: Any = self.tokenizer(text, add_special_tokens=self.plain, return_tensors="pt", verbose=False)
        return encoded["input_ids"]  # type: ignore[no-any-return]


def read_template(settings: ChatSettings) -> str | None:
    """The text of the template that the settings name, `None` if they name none."""
    if settings.template is None:
        return None
    if settings.raw:
        raise InvalidArgumentError(
            f"--raw uses no template, but --template {settings.template} names one; choose one of the two"
        )
    return read_text(settings.template, "the template", "--template")


def choose_format(settings: ChatSettings, template: str | None, loaded: LoadedModel, notes: Console) -> TurnFormat:
    """The format that the settings ask for, tried on a first turn."""
    plain = settings.raw
    if settings.model is None:
        notes.print(
            "note: no --model was given, so the demonstration model is used; it is a small model of Python code: it "
            "continues code, it does not answer questions"
        )
        plain = plain or template is None
    if not (plain or template or loaded.tokenizer.chat_template):
        raise InvalidArgumentError(
            f"--model {settings.model}: the tokenizer has no chat template, so nothing says how this model takes a "
            "conversation; give a Jinja template with --template FILE, or take turns as plain text with --raw"
        )
    turns, question = TurnFormat(loaded.tokenizer, template, plain), _turn("user", "Hello")
    if settings.system is None:
        turns.encode([question])
        return turns
    both = turns.encode([_turn("system", checked(settings.system, "the text of --system")), question])
    with suppress(InvalidArgumentError):  # a template may insist on a system message
        if settings.system and torch.equal(both, turns.encode([question])):
            notes.print("note: the chat template leaves out what --system says")
    return turns
