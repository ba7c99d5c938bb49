"""Miniatures: tiny random models of the same class as a large one, for trials; and their plain logits along a text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from lookahead.backends.transformers.chain_cache import is_encoder_decoder, trial_source
from lookahead.backends.transformers.model_state import forward_arguments

HIDDEN = 64
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
VOCABULARY = 96

_NAMES: dict[int, str] = {
    VOCABULARY: """
        intermediate_size ffn_dim d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner
        intermediate_size_mlp dense_intermediate_size feed_forward_size shared_intermediate_size
        alignment_intermediate_size projection_intermediate_size mlp_dim aligner_ffn_dim projection_hidden_dim
        adapter_intermediate_size pronunciation_vocab_size shape_vocab_size
    """,
    HIDDEN: """
        hidden_size d_model n_embd dim emb_dim embed_dim word_embed_proj_dim d_kv_proj embedding_size
        input_embedding_size output_embedding_size embedding_dim hidden_size_global cross_attention_hidden_size
        attention_hidden_size lru_width text_hidden_size input_size encoder_hidden_size projection_dim out_hidden_size
        output_dim projector_hidden_size backbone_hidden_size dim_model_base projector_input_dim projector_output_dim
        hidden_dim pronunciation_embed_dim shape_embed_dim axial_pos_embds_hidden projection_hidden_size mamba_d_ssm
        adapter_in_dim image_text_hidden_size merged_hidden_size vision_hidden_size audio_hidden_size adapter_out_dim
        patch_embed_hidden_size protein_hidden_size codebook_dim encoder_hash_byte_group_vocab ngram_vocab_size_base
    """,
    32: """
        moe_intermediate_size shared_expert_intermediate_size moe_hidden_size share_expert_dim expert_ffn_hidden_size
        shared_experts_intermediate_size router_hidden_size
    """,
    HEAD_DIM: """
        head_dim swa_head_dim v_head_dim kv_lora_rank q_lora_rank index_head_dim d_head query_pre_attn_scalar
        kv_channels d_kv global_head_dim linear_key_head_dim dim_head linear_value_head_dim linear_head_dim
        attention_head_dim hidden_size_per_layer_input attention_head_size o_lora_rank laurel_rank hc_lowrank d_rel
        swa_v_head_dim resampler_head_dim resampler_dim_head gated_norm_rank mamba_d_head adapter_rank mamba_head_dim
        qk_head_dim         mamba_headdim indexer_head_dim ple_embed_dim block_size hidden_dim_per_layer kda_head_dim
    """,
    8: """
        qk_rope_head_dim qk_nope_head_dim rotary_dim state_size mamba_d_state ssm_state_size chunk_size
        mamba_chunk_size
    """,
    HEADS: """
        num_attention_heads num_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads
        num_kv_heads swa_num_attention_heads num_sliding_attention_heads linear_num_value_heads linear_num_heads
        num_query_groups num_experts num_local_experts n_routed_experts moe_num_experts num_ladder_heads
        conf_num_attention_heads resampler_n_heads resampler_heads mamba_n_heads mamba_num_heads n_mamba_heads
        make_ngram_vocab_size_divisible_by
    """,
    2: """
        num_key_value_heads swa_num_key_value_heads multi_query_group_num linear_num_key_heads num_experts_per_tok
        moe_topk moe_k num_experts_per_token n_group num_expert_group index_n_heads altup_num_inputs hc_mult hc_count
        n_groups o_groups zero_expert_num moe_top_k kv_n_heads num_global_key_value_heads resampler_depth
        num_local_layers attn_layer_period split_ngram_parts type_vocab_size
    """,
    1: """
        expand mamba_expand attn_layer_offset first_k_dense_replace n_shared_experts num_shared_experts
        moe_num_shared_experts topk_group num_dense_layers max_window_layers num_nextn_predict_layers
    """,
}
"""Names of sizes in configurations of language models, by their value in a miniature. Other settings stay."""

_TOWER_NAMES: dict[int, str] = {
    HIDDEN: "vision_output_dim",
    28: "image_size",
    HEAD_DIM: "max_source_positions num_position_embeddings position_embedding_size output_channels",
    14: "patch_size",
    8: "num_mel_bins",
    HEADS: "num_key_value_heads",
    2: "num_query_tokens resampler_n_latents resampler_num_latents latent_query_num",
    1: "depth encoder_layers num_global_layers conf_num_hidden_layers",
}
"""Names that differ in towers for images and sound; miniatures build these but never run them."""

SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
TOWER_SIZES = SIZES | {name: size for size, names in _TOWER_NAMES.items() for name in names.split()}

# Settings that must fit the sizes above.
OTHERS: dict[str, Any] = {
    "attn_layer_indices": [1],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "qk_dim_factor": 1.0,
}

# Vocabulary sizes. A miniature needs enough tokens for its texts, even if the model has fewer.
VOCABULARIES = ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input")

# Numbers of layers.
LAYERS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_blocks", "layers"),
    *("num_decoder_layers", "num_layers_per_stack", "encoder_layers"),
)

# Lengths where the attention of a layer ends or changes.
WINDOWS = (
    *("sliding_window", "attention_chunk_size", "sliding_window_size", "local_attention", "attention_window_size"),
    *("rel_extent", "floor_scale", "log_scaling_n_floor", "index_topk", "keep_window_size"),
)

# Lengths of position tables, or of the context of RoPE.
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions", "context_length")

_SPREAD = 4.0
"""Standard deviation of the logits: large, so that each visible token has an effect."""


def build_miniature(kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model of class `kind` with the small sizes of `miniature_config`, in float32 on the CPU, in eval mode.

    Its weights are random, by `seed`.

    Raises:
        Exception: The class raised it for contradictory sizes.
    """
    attention = config._attn_implementation
    if attention not in ("eager", "sdpa"):
        attention = "sdpa" if kind._supports_sdpa else "eager"
    # Leave the caller's random numbers, default device and inference mode alone.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), quiet():
        small: PreTrainedModel = kind._from_config(
            miniature_config(config), attn_implementation=attention, dtype=torch.float32
        )
        with torch.no_grad():
            _draw_weights(small.eval(), torch.Generator().manual_seed(seed))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(small.generation_config, token, None)
    return small


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and logs, for example about the sizes of a miniature."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _draw_weights(model: PreTrainedModel, random: torch.Generator) -> None:
    """Draw random weights that make attention matter; set all, since some models leave weights uninitialised."""
    embedding = model.get_input_embeddings()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=random)
            if module is embedding:
                parameter.copy_(2 * noise)
            elif isinstance(module, torch.nn.Embedding):  # learned positions
                parameter.copy_(0.3 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(middle(name, parameter) + 0.1 * noise)
            else:
                fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
                parameter.copy_(1.3 * noise / fan_in**0.5)
    weight = getattr(model.get_output_embeddings(), "weight", None)
    tokens = torch.randint(1, VOCABULARY, (2, 16), generator=random)
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if is_encoder_decoder(model):
        arguments = {**trial_source(model), "decoder_input_ids": tokens[:1]}
    for _ in range(3):  # several times, because a soft cap on logits is not linear
        logits = model(**arguments, use_cache=False).logits
        deviation = float(logits.std())
        if weight is not None and math.isfinite(deviation) and deviation > 0:
            weight.mul_(min(max(_SPREAD / deviation, 1e-3), 1e3))


def middle(name: str, parameter: torch.Tensor) -> float:
    """Return the mean for a vector: its initial value if that is uniform and moderate, else 0 or 1."""
    if "bias" in name or "sink" in name or not parameter.numel():
        return 0.0
    first = float(parameter.flatten()[0])
    return first if math.isfinite(first) and abs(first) <= 4 and bool((parameter == first).all()) else 1.0


def usual_tokens(config: PreTrainedConfig) -> list[int]:
    """Return the tokens of a miniature without a special meaning in its configuration."""
    special: list[object] = []
    parts: list[Any] = [config.to_dict()]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if _is_token(str(name)):
                special += value if isinstance(value, list) else [value]
    return [token for token in range(3, VOCABULARY - 16) if token not in special]


def draw_text(tokens: int, seed: int, usual: Sequence[int]) -> list[int]:
    """Return a random text of `usual` tokens with repetitions."""
    random = torch.Generator().manual_seed(seed)
    few = torch.randint(len(usual), (12,), generator=random)
    return [usual[int(few[index])] for index in torch.randint(len(few), (tokens,), generator=random)]


@torch.no_grad()
def plain_logits(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    prompt: int,
    hidden: Sequence[Sequence[int]] | None = None,
    use_cache: bool = True,
) -> torch.Tensor:
    """Return the logits of `model.generate` for each token of texts of equal length after their prompts.

    Args:
        model: A miniature.
        texts: Token ids, hidden ones included.
        prompt: Length of the prompt in each text.
        hidden: Indices of hidden tokens in each text.
        use_cache: As for `generate`.

    Returns:
        `[batch, tokens - prompt, vocabulary]` float32.

    Raises:
        ArithmeticError: The model's `generate` does not write the given texts.
    """
    ids = torch.tensor(texts)
    arguments: dict[str, Any] = {"input_ids": ids[:, :prompt]}
    if hidden is not None or "attention_mask" in forward_arguments(model):
        mask = torch.ones_like(ids)
        for row, places in enumerate(hidden or []):
            mask[row, list(places)] = 0
        arguments["attention_mask"] = mask[:, :prompt]
    if is_encoder_decoder(model):
        starts = [text[0] for text in texts]
        source = trial_source(model, len(texts))
        arguments = {**source, "decoder_input_ids": ids[:, :prompt], "decoder_start_token_id": starts}
    written: list[Any] = []

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).scatter_(1, ids[:, input_ids.shape[1], None], 0.0)

    def decode(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        # In place of a list of processors, which inspects the signature of each at every token.
        written.append(GenerationMixin._sample(model, input_ids, **(prepared | {"logits_processor": force})))
        return written[-1]

    own = type(model).generate
    # Classes of transformers with their own `generate` accept images or sound, and call this one.
    output = (GenerationMixin.generate if own.__module__.startswith("transformers.") else own)(
        model,
        **arguments,
        custom_generate=decode,
        use_cache=use_cache,
        max_new_tokens=ids.shape[1] - prompt,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    if len(written) != 1 or written[0] is not output or not torch.equal(output.sequences, ids):
        raise ArithmeticError("its generate does not return the forced text after one decoding")
    return torch.stack(output.logits, dim=1).float()


WINDOW = 12
"""Length of every window, chunk and period of a miniature."""

CONTEXT = 48
"""Length of its position table, or context of RoPE."""

ORIGINAL_CONTEXT = 24
"""Original context of scaled RoPE, for configurations that distinguish it from `CONTEXT`."""

_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config", "text_encoder", "decoder", "vlm_config")
"""Names of the language model in composite configurations."""

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_LEFT_OUT = (
    *("quantization_config", "auto_map", "transformers_version", "architectures", "dtype", "torch_dtype"),
    "hybrid_layer_ids",  # follows from the kinds of the layers
)


def miniature_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small configuration of the same class, with the same kinds of layers, positions and attention.

    Raises:
        Exception: The configuration's class raised it for contradictory sizes.
    """
    return type(config).from_dict(shrunk(config))


def shrunk(config: PreTrainedConfig, tower: bool = False) -> dict[str, Any]:
    """Return the settings of a miniature of a model, or of its tower for images or sound."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    depth = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    layers = _layers(fields, depth, 1 if tower else 2)
    small = dict(fields)
    if shares := bool(fields.get("num_kv_shared_layers")):  # each kind with its own keys, and with shared ones
        layers = [*layers, *layers]
    for name, value in fields.items():
        part = vars(config).get(name)
        if isinstance(part, PreTrainedConfig):
            small[name] = shrunk(part, tower or name not in _LANGUAGE)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            small[name] = _rope(value, fields)
        elif isinstance(value, list) and depth and len(value) == depth:
            small[name] = [value[layer] for layer in layers]
        elif name == "per_layer_config" and value:
            small[name] = _layer_sizes(value, fields, layers, tower)
        elif name in OTHERS and value is not None:
            small[name] = OTHERS[name]
        elif value is None and name == "head_dim":
            small[name] = HEAD_DIM
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _size(name, value, fields, len(layers), tower)
    if shares:
        small["num_kv_shared_layers"] = len(layers) // 2
    return small


def _size(name: str, value: int, fields: dict[str, Any], layers: int, tower: bool) -> int:
    sizes = TOWER_SIZES if tower else SIZES
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):  # latent attention
        return sizes["qk_rope_head_dim"]
    if name in ("attention_hidden_size", "attention_head_dim") and is_doubled(fields):
        return 2 * sizes[name]
    if name == "num_hidden_layers" and fields.get("num_layers_per_stack"):  # a stack is run several times
        return layers * int(value // fields["num_layers_per_stack"])
    if name in LAYERS:
        return layers
    if name in VOCABULARIES:
        return VOCABULARY
    if name in WINDOWS and not tower:
        return WINDOW
    if name == "original_max_position_embeddings":
        return ORIGINAL_CONTEXT
    if name in CONTEXTS:
        return 16 if tower else CONTEXT
    if name in _KEY_VALUE_HEADS and not tower:
        heads = next((fields[name] for name in ("num_attention_heads", "n_head") if fields.get(name)), value)
        return _size("num_heads", heads, {}, layers, tower) if value == heads else min(value, 2)
    if _is_token(name):
        return min(value, VOCABULARY - 1)
    if sizes.get(name) == HEADS and 0 < value < HEADS:
        return 1 << (value.bit_length() - 1)  # three do not divide the hidden size
    return min(value, sizes.get(name, value)) if value > 0 else value


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_index"))


def _layer_sizes(
    sizes: Mapping[str, Mapping[str, Any]], fields: dict[str, Any], layers: list[int], tower: bool
) -> dict[int, dict[str, Any]]:
    """Return the deviating sizes of single layers, by their numbers in the miniature."""
    by_layer = {int(layer): dict(changes) for layer, changes in sizes.items()}
    return {
        index: {
            name: _size(name, value, fields | by_layer[layer], len(layers), tower) if type(value) is int else value
            for name, value in by_layer[layer].items()
        }
        for index, layer in enumerate(layers)
        if layer in by_layer
    }


def is_doubled(fields: Mapping[str, Any]) -> bool:
    """Return whether attention has twice the hidden size, as in Zamba, which concatenates embeddings and states."""
    return fields.get("attention_hidden_size") == 2 * (fields.get("hidden_size") or 0) != 0


def _layers(fields: dict[str, Any], depth: int | None, min_layers: int) -> list[int]:
    """Select the layers of a miniature: one of each kind, and at least `min_layers`."""
    if depth is None:
        return list(range(min_layers))
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == depth]
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(repr([values[layer] for values in lists]), layer)
    first = list(kinds.values())
    return sorted([*first, *(layer for layer in range(depth) if layer not in first)][: max(min_layers, len(first))])


def _rope(rope: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    if "rope_type" not in rope:  # one for each type of layers
        return {name: _rope(value, fields) if isinstance(value, dict) else value for name, value in rope.items()}
    rope = dict(rope)
    partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    half = int((SIZES["qk_rope_head_dim"] if fields.get("qk_rope_head_dim") else HEAD_DIM) * partial) // 2
    if "mrope_section" in rope:
        sections = rope["mrope_section"]
        third = half // 3
        # Some models have the two equal sections first.
        parts = [half - 2 * third, third, third]
        rope["mrope_section"] = parts[::-1] if sections[0] == sections[1] != sections[2] else parts
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][:half]
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = ORIGINAL_CONTEXT
    return rope
