"""Tiny models of the layer classes beyond BERT's and T5's: one model of each layer class, and one layer that keeps the stock forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXT: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=32,
    max_position_embeddings=24,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1,
)
GROUPED = {**TEXT, "num_attention_heads": 6, "num_key_value_heads": 3}
"""Pairs of heads of width 4 that share keys and values."""
SEQ2SEQ: dict[str, Any] = dict(
    vocab_size=64,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    init_std=0.3,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1,
    decoder_start_token_id=2,
)


@dataclass(frozen=True)
class Sample:
    """One model: the layer class that serves its attention, its config class, the config's fields, and what it takes."""

    layer_class: str
    config: str
    settings: dict[str, Any] = field(default_factory=lambda: TEXT)
    takes: str = "text"
    generates: bool = False
    counts_indices: bool = False
    """Whether tokens are known by their index in the batch, so that padding on the left moves them in the stock model too."""


LAYER_CLASSES: dict[str, Sample] = {
    "DistilBertForSequenceClassification": Sample(
        "PlainLayer",
        "DistilBertConfig",
        dict(
            vocab_size=64,
            dim=24,
            n_layers=2,
            n_heads=3,
            hidden_dim=32,
            max_position_embeddings=24,
            initializer_range=0.3,
        ),
    ),
    "ViTForImageClassification": Sample(
        "PlainLayer",
        "ViTConfig",
        dict(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=32,
            image_size=(2, 14),  # seven patches and a class token
            patch_size=2,
            num_channels=1,
            initializer_range=0.3,
        ),
        takes="images",
    ),
    "AlbertForSequenceClassification": Sample("AlbertLayer", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    "EsmForSequenceClassification": Sample(
        "EsmLayer",
        "EsmConfig",
        {**TEXT, "mask_token_id": 3, "token_dropout": False, "position_embedding_type": "rotary"},
    ),
    "MPNetForSequenceClassification": Sample("MPNetLayer", "MPNetConfig"),
    "Wav2Vec2ForSequenceClassification": Sample(
        "SpeechEncoderLayer",
        "Wav2Vec2Config",
        {
            **TEXT,  # `max_position_embeddings` included, which the type itself does not name
            "conv_dim": (8,),
            "conv_stride": (4,),
            "conv_kernel": (4,),
            "num_feat_extract_layers": 1,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 8,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        takes="sound",
    ),
    "ModernBertForSequenceClassification": Sample(
        "RotaryEncoderLayer", "ModernBertConfig", {**TEXT, "local_attention": 6, "global_attn_every_n_layers": 2}
    ),
    "NomicBertForMaskedLM": Sample("MaskFirstEncoderLayer", "NomicBertConfig"),
    "BartForConditionalGeneration": Sample(
        "BartLayer",
        "BartConfig",
        {**SEQ2SEQ, "max_position_embeddings": 24, "forced_eos_token_id": None},
        takes="text to text",
        generates=True,
        counts_indices=True,
    ),
    "WhisperForConditionalGeneration": Sample(
        "WhisperLayer",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "max_source_positions": 8,
            "max_target_positions": 24,
            "num_mel_bins": 4,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
        takes="features to text",
    ),
    "LlamaForCausalLM": Sample("RotaryDecoderLayer", "LlamaConfig", GROUPED, generates=True),
    "GraniteMoeHybridForCausalLM": Sample(
        "MaskFirstDecoderLayer",
        "GraniteMoeHybridConfig",
        {
            **GROUPED,
            "layer_types": ["attention", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.5,
            "mamba_n_heads": 8,
            "mamba_d_head": 6,
        },
        generates=True,
    ),
    "Qwen2VLTextModel": Sample(
        "PositionedDecoderLayer",
        "Qwen2VLTextConfig",
        {
            **GROUPED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
        },
    ),
    "StableLmForCausalLM": Sample(
        "StableLmLayer", "StableLmConfig", {**GROUPED, "partial_rotary_factor": 0.5}, generates=True
    ),
    "GPT2LMHeadModel": Sample(
        "Gpt2Layer",
        "GPT2Config",
        dict(
            vocab_size=64,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_inner=32,
            n_positions=24,
            initializer_range=0.3,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=1,
        ),
        generates=True,
    ),
    "OPTForCausalLM": Sample(
        "OptLayer", "OPTConfig", {**TEXT, "ffn_dim": 32, "init_std": 0.3, "word_embed_proj_dim": 24}, generates=True
    ),
    "GPTNeoXForCausalLM": Sample("GptNeoXLayer", "GPTNeoXConfig", TEXT, generates=True),
    "Phi3ForCausalLM": Sample("StockForwardLayer", "Phi3Config", GROUPED, generates=True),
}
"""By the name of a model class of Transformers."""
OF_TEXT = tuple(head for head, sample in LAYER_CLASSES.items() if sample.takes in ("text", "text to text"))
"""Those that take tokens and a mask."""
GENERATING = tuple(head for head, sample in LAYER_CLASSES.items() if sample.generates)
