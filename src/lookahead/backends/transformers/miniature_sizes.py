"""How large a miniature is: a table of the names that configurations give to their sizes."""

from __future__ import annotations

from typing import Any

HIDDEN = 64
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
VOCABULARY = 96

# Sizes of language models. A size that is not in here stays as it is.
SIZES: dict[str, int] = {
    **dict.fromkeys(
        (
            *("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "word_embed_proj_dim", "d_kv_proj"),
            *("embedding_size", "input_embedding_size", "output_embedding_size", "embedding_dim", "hidden_size_global"),
            *("cross_attention_hidden_size", "attention_hidden_size", "lru_width", "text_hidden_size", "input_size"),
            *("encoder_hidden_size", "projection_dim", "out_hidden_size", "output_dim", "projector_hidden_size"),
            *("backbone_hidden_size", "dim_model_base", "projector_input_dim", "projector_output_dim", "hidden_dim"),
            *("pronunciation_embed_dim", "shape_embed_dim", "axial_pos_embds_hidden", "projection_hidden_size"),
            *("mamba_d_ssm", "image_text_hidden_size", "merged_hidden_size", "vision_hidden_size", "audio_hidden_size"),
            *("adapter_out_dim", "patch_embed_hidden_size", "protein_hidden_size", "codebook_dim"),
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "d_ff", "dff", "dim_ff", "d_inner", "decoder_ffn_dim", "encoder_ffn_dim"),
            *("ffn_hidden_size", "n_inner", "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size"),
            *("shared_intermediate_size", "alignment_intermediate_size", "projection_intermediate_size", "mlp_dim"),
            *("aligner_ffn_dim", "projection_hidden_dim", "adapter_intermediate_size"),
        ),
        96,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_hidden_size", "share_expert_dim"),
            *("expert_ffn_hidden_size", "shared_experts_intermediate_size", "router_hidden_size"),
        ),
        32,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "num_kv_heads", "swa_num_attention_heads", "num_sliding_attention_heads"),
            *("linear_num_value_heads", "linear_num_heads", "num_query_groups", "num_experts", "num_local_experts"),
            *("n_routed_experts", "moe_num_experts", "num_ladder_heads", "conf_num_attention_heads"),
            *("resampler_n_heads", "resampler_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            *("num_key_value_heads", "swa_num_key_value_heads", "multi_query_group_num", "linear_num_key_heads"),
            *("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "n_group", "num_expert_group"),
            *("index_n_heads", "altup_num_inputs", "hc_mult", "hc_count", "n_groups", "o_groups", "zero_expert_num"),
            *("moe_top_k", "kv_n_heads", "num_global_key_value_heads", "resampler_depth", "num_local_layers"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("head_dim", "swa_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "index_head_dim", "d_head"),
            *("query_pre_attn_scalar", "kv_channels", "d_kv", "global_head_dim", "linear_key_head_dim", "dim_head"),
            *("linear_value_head_dim", "linear_head_dim", "attention_head_dim", "hidden_size_per_layer_input"),
            *("attention_head_size", "o_lora_rank", "laurel_rank", "hc_lowrank", "d_rel", "swa_v_head_dim"),
            *("resampler_head_dim", "resampler_dim_head", "gated_norm_rank", "mamba_d_head", "adapter_rank"),
            *("mamba_head_dim", "mamba_headdim", "indexer_head_dim"),
            *("ple_embed_dim",),
        ),
        HEAD_DIM,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("expand", "mamba_expand"), 1),
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "block_size": 16,
    **dict.fromkeys(
        (
            *("first_k_dense_replace", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
            *("topk_group", "num_dense_layers", "max_window_layers", "num_nextn_predict_layers"),
        ),
        1,
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    "unpadded_vocab_size": VOCABULARY,
    "hidden_dim_per_layer": HEAD_DIM,
    "encoder_hash_byte_group_vocab": 64,
    "pronunciation_vocab_size": VOCABULARY,
    "shape_vocab_size": VOCABULARY,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
    "type_vocab_size": 2,
    "kda_head_dim": HEAD_DIM,
}

# What is no size, and has to go with those above.
OTHERS: dict[str, Any] = {
    "attn_layer_indices": [1],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "qk_dim_factor": 1.0,
}

# How many layers a model has, by the name a configuration gives to it.
LAYERS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_blocks", "layers"),
    *("num_decoder_layers", "num_layers_per_stack", "encoder_layers"),
)

# Lengths behind which a layer sees no further, or reads keys or queries otherwise.
WINDOWS = (
    *("sliding_window", "attention_chunk_size", "sliding_window_size", "local_attention", "attention_window_size"),
    *("rel_extent", "floor_scale", "log_scaling_n_floor", "index_topk", "keep_window_size"),
)

# Lengths of position tables, or what RoPE takes for the length that it was trained on.
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions", "context_length")

# Sizes of towers for images and sounds: these are never run, only built.
TOWER_SIZES: dict[str, int] = {
    **SIZES,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "depth": 1,
    "encoder_layers": 1,
    "num_global_layers": 1,
    "max_source_positions": 16,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "num_query_tokens": 2,
    "resampler_n_latents": 2,
    "resampler_num_latents": 2,
    "latent_query_num": 2,
    "num_mel_bins": 8,
    "output_channels": 16,
    "max_num_tiles": 1,
    "vision_output_dim": 64,
    "conf_num_hidden_layers": 1,
}
