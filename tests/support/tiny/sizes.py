"""Special fields of configurations by model type, beyond the library's table of sizes."""

from __future__ import annotations

from typing import Any

from lookahead.backends.transformers.miniature import HEAD_DIM, HEADS, HIDDEN

_SLIDING_FULL = ["sliding_attention", "full_attention"]
_HYBRID = ["linear_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED_KEYS = {"num_hidden_layers": 4, "layer_types": 2 * _SLIDING_FULL, "num_kv_shared_layers": 2}
_SPEECH_DECODER = {"num_codebooks": 1, "hidden_size": HIDDEN}

SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 3}},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "blt": {"hidden_size_global": HIDDEN},
    "chameleon": {"vocabulary_map": {"<image>": 1, "<racm3:break>": 2, "<eoss>": 3, "IMGIMGA": 4}},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _SLIDING_FULL}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), HEADS),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim", "swa_v_head_dim"), HEAD_DIM),
        "swa_qk_nope_head_dim": HEAD_DIM // 2,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_merge_size": 2},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN},
    "falcon_h1": {"mamba_d_head": 16},
    "fun_asr_nano_adaptor": {"intermediate_size": HIDDEN // 4},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {**_SHARED_KEYS, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "intermediate_size": 96},
    "gemma3n_vision": {"hidden_size": 2048},
    "gemma4": {"for default": {"vision_config": {}}},
    "glm5_next_text": {"index_kpool": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    "gemma4_unified": {"for default": {"vision_config": {}}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granite_docling": {"scale_factor": 2},
    "granitemoehybrid": {"layer_types": _HYBRID, "num_hidden_layers": 2},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "hy_v4": {
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
        "layer_types": ["indexed_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "jamba": {"num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "llama4_vision_model": {
        "intermediate_size": 4 * HIDDEN,
        "projector_input_dim": HIDDEN,
        "projector_output_dim": HIDDEN,
    },
    "llava_next": {"image_grid_pinpoints": [[28, 56]]},
    "llava_next_video": {"image_grid_pinpoints": [[28, 56]]},
    "llava_onevision": {"image_grid_pinpoints": [[28, 56]]},
    "mistral_large4_text": {"kv_source_layers": None},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {"max_num_tiles": 4},
    "molmo2_adapter": {"vision_feature_layer": [0]},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark_audio": {"num_hidden_layers": 1, "patch_sizes": [16], "hidden_sizes": [16], "depths": [1]},
    "musicgen_decoder": _SPEECH_DECODER,
    "musicgen_melody_decoder": _SPEECH_DECODER,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 120},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "num_hidden_layers": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [32, 32], "is_decoder": True},
    "speech_to_text": {"max_source_positions": 16, "input_feat_per_channel": 8},
    "step3p5": {"sliding_window": 8},
    "timm_wrapper": {"hidden_size": 2048},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "vipllava": {"vision_feature_layer": (-2, -1)},
    "whisper": {"max_source_positions": 16, "num_mel_bins": 8},
    "xlm": {"mask_token_id": 5},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
"""`for default` applies to the default configuration before its sizes are reduced."""

# Families with a default `mrope_section` that does not fit small sizes.
MROPE = (
    *("glm4v_text", "glm4v_moe_text", "glm46v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_5_vl_text"),
    *("qwen2_vl_text", "qwen2_5_omni_text"),
)
