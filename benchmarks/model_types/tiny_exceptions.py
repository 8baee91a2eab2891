"""What the one rule for tiny models (`tiny_models.py`) does not know of single model types."""

from __future__ import annotations

from typing import Any

import torch


def _rotation(*sections: int, **more: Any) -> dict[str, Any]:
    """A rotation by time, height and width, whose sections fill a head of width 16 (or the part that is rotated)."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
    }


_THREE = _rotation(2, 3, 3)
_HALF = _rotation(2, 1, 1, partial_rotary_factor=0.5)
_FORECAST: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16}
_BOTH = {"layer_types": ["mamba", "attention"]}
_RESNET: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "out_features": ["stage4"],
        "hidden_sizes": [16, 16, 16, 32],
        "embedding_size": 16,
        "depths": [1, 1, 1, 1],
    },
}
_STAGES: dict[str, Any] = {
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "embed_dim": 16,
    "image_size": 32,
    "patch_size": 4,
}
_VIDEO: dict[str, Any] = {"num_frames": 2, "tubelet_size": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": _FORECAST,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "colqwen2": {"vlm_config": {"text_config": _THREE}},
    "conditional_detr": _RESNET,
    "csm": {"codec_config": {"upsample_groups": 64}},
    "dab-detr": _RESNET,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deformable_detr": _RESNET,
    "detr": _RESNET,
    "donut-swin": _STAGES,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "esm": {"vocab_size": 99, "pad_token_id": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "flaubert": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": _HALF,
    "glm4v_text": _HALF,
    "glm_image_text": _HALF,
    "glm_ocr_text": _rotation(2, 3, 3),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granite_speech5_encoder": {"context_size": 16},
    "granitemoehybrid": {**_MAMBA, **_BOTH},
    "hunyuan_vl_text": _rotation(2, 2, 2, 2),
    "informer": _FORECAST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"head_dim": 8, "qk_rope_head_dim": 8},
    "maskformer-swin": _STAGES,
    "mamba2": {"num_heads": 8},
    "mimi": {"upsample_groups": 64},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "layers_block_type": ["mamba", "attention"],
    },
    "paddleocr_vl_text": _THREE,
    "qwen2_5_omni_talker": _THREE,
    "qwen2_5_omni_text": _THREE,
    "qwen2_5_omni_thinker": {"text_config": _THREE},
    "qwen2_5_vl_text": _THREE,
    "qwen2_vl_text": _THREE,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "step3p5": {"sliding_window": 4},
    "swin": _STAGES,
    "swin2sr": {**_STAGES, "window_size": 4},
    "swinv2": _STAGES,
    "table-transformer": _RESNET,
    "time_series_transformer": _FORECAST,
    "videomae": _VIDEO,
    "vitpose_backbone": {"image_size": [32, 32], "patch_size": [8, 8]},
    "vitpose": {"backbone_config": {"model_type": "vitpose_backbone"}},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of a type's config; under the name of a sub-config, its fields, with a `model_type` where it may be any."""
MODELS: dict[str, str] = {}
"""The class that stands for a type, where the first that is found does not."""
COMPOSITES: dict[str, tuple[str, str]] = {
    "encoder-decoder": ("bert", "bert"),
    "speech-encoder-decoder": ("wav2vec2", "bert"),
    "vision-encoder-decoder": ("vit", "gpt2"),
}
"""The encoder and the decoder of a type that is made of any two."""


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _words(rows: int, length: int) -> torch.Tensor:
    return torch.randint(40, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def _series() -> dict[str, Any]:
    """Eleven values, of which the first three are looked back at, and four to come."""
    return {
        "past_values": lambda: _noise(2, 11).abs(),
        "past_time_features": lambda: _noise(2, 11, 1),
        "past_observed_mask": lambda: torch.ones(2, 11),
        "future_values": lambda: _noise(2, 4).abs(),
        "future_time_features": lambda: _noise(2, 4, 1),
    }


def _patches_of_one_image(width: int, *more: str) -> dict[str, Any]:
    """An image of 4 × 4 patches, as models of many resolutions take it."""
    grid = {"grid_thw": lambda: torch.tensor([[1, 4, 4]])}
    return {"hidden_states": lambda: _noise(16, width), **grid}


INPUTS: dict[str, dict[str, Any]] = {
    "autoformer": _series(),
    "blip_2_qformer": {"query_embeds": lambda: _noise(2, 6, 64), "encoder_hidden_states": lambda: _noise(2, 5, 64)},
    "decision_transformer": {
        "states": lambda: _noise(2, 5, 17),
        "actions": lambda: _noise(2, 5, 4),
        "rewards": lambda: _noise(2, 5, 1),
        "returns_to_go": lambda: _noise(2, 5, 1),
        "timesteps": lambda: torch.arange(5).expand(2, 5),
        "attention_mask": lambda: torch.ones(2, 5, dtype=torch.long),
    },
    "idefics": {
        "input_ids": lambda: _words(2, 10),
        "pixel_values": lambda: _noise(2, 1, 3, 32, 32),
        "image_attention_mask": lambda: torch.ones(2, 10, 1),
    },
    "informer": _series(),
    "mobilevitv2": {"pixel_values": lambda: _noise(2, 3, 256, 256)},
    "musicgen_decoder": {"input_ids": lambda: _words(8, 10)},
    "musicgen_melody_decoder": {"input_ids": lambda: _words(8, 10)},
    "patchtsmixer": {"past_values": lambda: _noise(2, 64, 1)},
    "patchtst": {"past_values": lambda: _noise(2, 64, 1)},
    "pix2struct_vision_model": {"flattened_patches": lambda: _noise(2, 9, 66).abs()},
    "siglip2_vision_model": {
        "pixel_values": lambda: _noise(2, 16, 192),
        "pixel_attention_mask": lambda: torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": lambda: torch.tensor([[4, 4], [4, 4]]),
    },
    "siglip2": {
        "input_ids": lambda: _words(2, 10),
        "pixel_values": lambda: _noise(2, 16, 192),
        "pixel_attention_mask": lambda: torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": lambda: torch.tensor([[4, 4], [4, 4]]),
    },
    "speecht5": {"input_values": lambda: _noise(2, 64, 64), "decoder_input_values": lambda: _noise(2, 7, 64)},
    "time_series_transformer": _series(),
    "videomae": {"pixel_values": lambda: _noise(2, 2, 3, 32, 32)},
    "vivit": {"pixel_values": lambda: _noise(2, 4, 3, 32, 32)},
}
"""Functions that make a type's inputs, by their names."""
