"""What the general rules get wrong for single models: fields of tiny configs, by model type."""

from typing import Any

import torch
from transformers import ResNetConfig


class Tiny:
    """A tiny config of another type, where a config has none by default."""

    def __init__(self, model_type: str, **fields: Any):
        self.model_type, self.fields = model_type, fields


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_LAST = ResNetConfig(**_RESNET, out_features=["stage4"])
_LATER = ResNetConfig(**_RESNET, out_features=_STAGES[1:])
_FOUR_OUT = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _letters(number: int) -> str:
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "bit": {"num_groups": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "chameleon": {"vocabulary_map": {"<image>": 10, **{f"IMGIMG{_letters(i)}Z": 60 + i for i in range(32)}}},
    "conditional_detr": {"backbone_config": _LAST, "use_timm_backbone": False, "backbone": None},
    "cosmos3_edge_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "dab-detr": {"backbone_config": _LAST, "use_timm_backbone": False, "backbone": None},
    "deformable_detr": {"backbone_config": _LATER, "use_timm_backbone": False, "backbone": None},
    "depth_pro": {
        "patch_size": 32, "intermediate_hook_ids": (1, 0), "intermediate_feature_dims": (32, 32),
        "scaled_images_feature_dims": (64, 64, 32),
    },
    "detr": {"backbone_config": _LAST, "use_timm_backbone": False, "backbone": None},
    "dinov3_convnext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "efficientloftr": {"stage_num_blocks": [1, 1, 1, 1], "out_features": [8, 8, 16, 32], "hidden_size": 32},
    "cvt": {"embed_dim": [8, 24, 48], "num_heads": [1, 3, 6], "depth": [1, 2, 3]},
    "deit": {"encoder_stride": 8},
    "depth_anything": {"backbone_config": {**_FOUR_OUT, "reshape_hidden_states": False}, "patch_size": 8},
    "maskformer-swin": {"window_size": 4},
    "prompt_depth_anything": {"backbone_config": {**_FOUR_OUT, "reshape_hidden_states": False}, "patch_size": 8},
    "sam_hq_vision_model": {"num_pos_feats": 16},
    "sam_vision_model": {"num_pos_feats": 16},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "instructblip": {"image_token_id": 9},
    "instructblipvideo": {"video_token_id": 9},
    "kosmos-2": {"latent_query_num": 4},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 64},
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16, 16], "upsample_kernel_sizes": [4, 4], "conv_out_channels": [16],
            "conv_kernel_sizes": [1],
        },
    },
    "pp_lcnet_v4": {"stem_channels": [3, 48, 96]},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "superpoint": {"keypoint_decoder_dim": 65, "max_keypoints": 8},
    "swin": {"window_size": 2},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "textnet": {"stem_out_channels": 8},
    "tipsv2_dpt": {"backbone_config": {**_FOUR_OUT, "reshape_hidden_states": False}},
    "zoedepth": {"backbone_config": {**_FOUR_OUT, "reshape_hidden_states": False}},
    "dinov3_vit": {"num_register_tokens": 4},
    "donut-swin": {"window_size": 2},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"out_channels": [16, 24, 40, 80, 112, 192, 320]},
    "align_vision_model": {"out_channels": [16, 24, 40, 80, 112, 192, 320]},
    "esm": {"mask_token_id": 6, "pad_token_id": 0},
    "vitmatte": {"backbone_config": {"patch_size": 16, "image_size": 64}},
    "csm": {"num_codebooks": 4},
    "vit": {"encoder_stride": 8},
    "xmod": {"default_language": "en_XX"},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 4},
    "qwen3_asr_encoder": {"n_window": 16, "n_window_infer": 32, "downsample_hidden_size": 8},
    "qwen3_omni_moe_audio_encoder": {"n_window": 16, "n_window_infer": 32, "downsample_hidden_size": 8},
    "qwen2_5_omni_audio_encoder": {"n_window": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "voxtral": {"audio_token_id": 9},
    "gemma4_vision": {"pooling_kernel_size": 2},
    "gemma4": {"vision_config": Tiny("gemma4_vision")},
    "levit": {"patch_size": 16, "depths": [2, 2, 2]},
    "llama4_vision_model": {
        "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
    "emu3": {"vocabulary_map": {
        "<image>": 10, "<|extra_200|>": 11, **{f"<|visual token {i:06d}|>": 60 + i for i in range(32)},
    }},
    "fun_asr_nano_adaptor": {"intermediate_size": 8},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3": {"mm_tokens_per_image": 4},
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 1, 0, 1]},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 32, 64], "stage_mid_channels": [8, 8, 16, 24],
        "stage_out_channels": [8, 32, 64, 128], "stage_numb_of_layers": [1, 1, 1, 1],
    },
    "lw_detr_vit": {
        "num_windows": 4, "num_hidden_layers": 4, "window_block_indices": [0, 2], "out_indices": [1, 2, 3, 4],
    },
    "mimi": {"upsample_groups": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "blip-2": {"image_token_id": 9},
    "mobilebert": {"embedding_size": 16},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "perceiver": {
        "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "num_self_attention_heads": 1,
        "num_cross_attention_heads": 1,
    },
    "pocket_tts_audio_tokenizer": {"upsample_groups": 32},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "sam2_hiera_det_model": {
        "blocks_per_stage": [1, 1, 1, 1], "embed_dim_per_stage": [8, 16, 24, 32], "hidden_size": 8,
        "num_attention_heads_per_stage": [1, 2, 2, 4], "global_attention_blocks": [2], "num_attention_heads": 1,
    },
    "sam2_vision_model": {"backbone_channel_list": [32, 24, 16, 8]},
    "table-transformer": {"backbone_config": _LAST, "use_timm_backbone": False, "backbone": None},
    "upernet": {"backbone_config": ResNetConfig(**_RESNET, out_features=_STAGES)},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "ctrl": {"dff": 64},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "falcon_h1": {**_MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 32},
    "gemma3n_text": {
        "num_hidden_layers": 4, "intermediate_size": 64, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"expert_ffn_hidden_size": 64, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4},
    "neomme": {"head_dim": 16},
    "reformer": {
        "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4, "num_buckets": 2, "is_decoder": True, "hash_seed": 0, "hidden_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
        "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 4, "mamba_d_state": 8},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 4, "adapter_rank": 4, "mamba_d_state": 8},
}  # fmt: skip


def _codebooks(batches: Any) -> dict[str, Any]:
    """Codes of every codebook as rows of their own."""
    return {"input_ids": batches.words(2 * batches.text.num_codebooks, 8)}


def _siglip2(batches: Any) -> dict[str, Any]:
    """Patches of images of any shape, padded."""
    text = {"input_ids": batches.words(2, 16)} if "input_ids" in batches.arguments else {}
    return {
        **text,
        "pixel_values": batches.floats(2, 16, 192),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


def _naflex(batches: Any) -> dict[str, Any]:
    """The same among words; four patches make one token."""
    batches.spec.placeholders.setdefault("image", 4)
    ids = batches.text_ids()
    return {**_siglip2(batches), "input_ids": ids, "labels": ids.clone()}


def _tiles(batches: Any) -> dict[str, Any]:
    """One image of up to four tiles, one of which is there."""
    return {
        "pixel_values": batches.floats(2, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]] * 2),
    }


def _gemma4(batches: Any) -> dict[str, Any]:
    """Patches with their places; four of them make one token."""
    batches.spec.placeholders = {"image": 4}
    places = torch.tensor([[x, y] for y in range(4) for x in range(4)]).expand(2, 16, 2)
    ids = batches.text_ids()
    return {
        "input_ids": ids,
        "pixel_values": batches.floats(2, 16, 192).sigmoid(),
        "image_position_ids": places.clone(),
        "mm_token_type_ids": (ids == batches.placeholder("image")).long(),
        "labels": ids.clone(),
    }


INPUTS: dict[str, Any] = {
    "gemma4": _gemma4,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "xlstm": ("+", lambda b: {"use_cache": False}),
    "csm": lambda b: {"input_ids": b.words(2, 8, 4)},
    "dia": lambda b: {"input_ids": b.words(2, 16), "decoder_input_ids": b.words(2, 8, 9)},
    "kyutai_speech_to_text": lambda b: {"input_ids": b.words(2, 8, 33)},
    "musicgen": lambda b: {"input_ids": b.words(2, 16), "decoder_input_ids": b.words(2 * b.text.num_codebooks, 8)},
    "musicgen_melody": lambda b: {
        "input_ids": b.words(2, 16),
        "decoder_input_ids": b.words(2 * b.text.num_codebooks, 8),
    },
    "pop2piano": ("+", lambda b: {"input_ids": None}),
    "deepseek_vl_hybrid": ("+", lambda b: {"high_res_pixel_values": b.floats(2, 3, 32, 32)}),
    "idefics": (
        "+",
        lambda b: {
            "pixel_values": b.floats(2, 1, 3, 32, 32),
            "image_attention_mask": torch.ones(2, 16, 1, dtype=torch.long),
        },
    ),
    "instructblip": ("+", lambda b: {"qformer_input_ids": b.words(2, 8)}),
    "instructblipvideo": (
        "+",
        lambda b: {"qformer_input_ids": b.words(2, 8), "pixel_values": b.floats(2, 4, 3, 32, 32)},
    ),
    "kosmos-2": ("+", lambda b: {"image_embeds_position_mask": torch.tensor([[0] + [1] * 4 + [0] * 11] * 2)}),
    "lfm2_vl": _naflex,
    "mllama": ("+", _tiles),
    "siglip2": _siglip2,
    "speech-encoder-decoder": ("+", lambda b: {"input_features": None}),
    "SpeechT5ForTextToSpeech": ("+", lambda b: {"decoder_input_values": b.floats(2, 8, b.config.num_mel_bins)}),
    "mllama_vision_model": _tiles,
    "qwen2_audio": ("+", lambda b: {"attention_mask": torch.ones_like(b.text_ids())}),
    "neomme": ("+", lambda b: {"pixel_values": None}),
    "depth_pro": lambda b: {"pixel_values": b.floats(2, 3, 128, 128)},
}
"""By class name or model type: a function of the Batches that makes the batch, or ("+", function) to add to it."""

CLASS_CONFIGS: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "DetrForSegmentation": {
        "backbone_config": ResNetConfig(**_RESNET, out_features=_STAGES),
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
    },
    "ReformerForMaskedLM": {"is_decoder": False},
}
"""Fields that a single class needs, by class name; "config_class" names the config it takes."""
