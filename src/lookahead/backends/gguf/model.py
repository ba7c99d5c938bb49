"""A GGUF model that transformers' `generate`, and all that is built on it, take for one of its own."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.backends.gguf.tokenizer import GGUFTokenizer
from lookahead.backends.llama_cpp.model import LlamaModel
from lookahead.backends.llama_cpp.plain_reader import PlainReader
from lookahead.errors import UnsupportedArgumentError


class GGUFConfig(PreTrainedConfig):  # type: ignore[misc]
    """What is known of a GGUF file: its tokens, its context, and a fingerprint of its content."""

    model_type = "gguf"


class GGUFModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A GGUF model. Its weights are llama.cpp's; for transformers it has none.

    `generate` decodes plainly, one token a step; `lookahead.generate` decodes the same text in fewer steps. Both take
    the arguments of transformers' `generate`, but no cache: what llama.cpp holds stays with it.

    Args:
        llama: The file, as llama.cpp loaded it.

    Attributes:
        llama: The file, as llama.cpp loaded it.
        tokenizer: The file's tokenizer, with its chat template.
        keeps_text: Whether a call of `lookahead.generate` with one row leaves its text in llama.cpp, so that the next
            one, if its prompt begins alike, goes on from there.
        reused_tokens: Tokens of the last prompt that were not computed anew because of that.
        generation_config: With the tokens that begin and end texts. The file's own sampling settings are not read.
    """

    config_class = GGUFConfig
    main_input_name = "input_ids"

    def __init__(self, llama: LlamaModel) -> None:
        tokens = llama.vocabulary
        known = {"bos_token_id": tokens.bos, "eos_token_id": tokens.ends or None, "pad_token_id": tokens.pad}
        super().__init__(
            GGUFConfig(
                vocab_size=len(tokens),
                hidden_size=llama.width,
                max_position_embeddings=llama.trained_context,
                description=llama.name,
                fingerprint=llama.fingerprint(),
                fast_kv=llama.fast_kv,
                **known,
            )
        )
        self.llama = llama
        self.tokenizer = GGUFTokenizer(tokens, llama.chat_template)
        self.generation_config = GenerationConfig(**known)
        # Says where inputs belong, and in which type logits come.
        self._place = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self._embeddings = _Embeddings(len(tokens))
        self.keeps_text = False
        self.reused_tokens = 0
        self._reader: PlainReader | None = None
        self._lock = Lock()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> _Embeddings:
        """How many tokens there are; the weights are llama.cpp's."""
        return self._embeddings

    def get_output_embeddings(self) -> None:
        """None that transformers could see."""
        return

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The whole text, at every step: of what was read before only the new part is computed."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits after the last token of each text.

        Args:
            input_ids: The texts, `[batch, tokens]` int64.
            attention_mask: Which of these tokens count, `[batch, tokens]`; all of them if not given.
            past_key_values: Not supported.
            use_cache: Of no account: what was read of a text is not computed again.
            return_dict: Of no account: there always is one.
            **kwargs: Nothing that would be heeded.

        Returns:
            With `logits`, `[batch, 1, vocabulary]` float32.

        Raises:
            UnsupportedArgumentError: There is a cache.
        """
        if past_key_values is not None:
            raise no_cache()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        texts = [row[mine.bool()].tolist() for row, mine in zip(input_ids, mask, strict=True)]
        with self._lock:
            if self._reader is None or not self._reader.fits(texts):
                self._reader = PlainReader(self.llama, texts)
            logits = self._reader.read(texts)
        return CausalLMOutputWithPast(logits=logits[:, None].to(input_ids.device))


class _Embeddings(torch.nn.Module):
    """Stands for the table of tokens, of which only the size is known."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.num_embeddings = tokens


def no_cache() -> UnsupportedArgumentError:
    """The error for a call that brings a cache."""
    return UnsupportedArgumentError(
        "past_key_values is not supported for a GGUF model, whose keys and values are llama.cpp's; give the whole text "
        "without it"
    )
