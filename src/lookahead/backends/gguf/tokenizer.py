"""The tokenizer of a GGUF file, with the interface of transformers' tokenizers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizer

from lookahead.backends.llama_cpp.vocabulary import Vocabulary


class GGUFTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Tokens as llama.cpp makes and reads them.

    Names of special tokens in a text are read as these tokens.

    Args:
        vocabulary: The tokens of the file.
        chat_template: Its chat template, in Jinja, if it has one.
    """

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None) -> None:
        self._vocabulary = vocabulary
        self._names = [vocabulary.name(token) for token in range(len(vocabulary))]
        self._tokens = {name: token for token, name in enumerate(self._names)}
        specials = {
            f"{kind}_token": self._names[token]
            for kind, token in (("bos", vocabulary.bos), ("eos", vocabulary.eos), ("pad", vocabulary.pad))
            if token is not None
        }
        super().__init__(chat_template=chat_template, padding_side="left", **specials)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        """Token ids by name."""
        return dict(self._tokens)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """The names of the tokens of `text`."""
        return [self._names[token] for token in self._vocabulary.encode(text, add_special=False)]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """With what the file says that texts begin and end with."""
        known = self._vocabulary
        begin = [known.bos] if known.adds_bos and known.bos is not None else []
        end = [known.eos] if known.adds_eos and known.eos is not None else []
        return [*begin, *token_ids_0, *(token_ids_1 or []), *end]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens by name."""
        return self._vocabulary.decode([self._tokens[name] for name in tokens])

    def _decode(self, token_ids: int | list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        tokens = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._vocabulary.decode(tokens, skip_special_tokens)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._tokens.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]
