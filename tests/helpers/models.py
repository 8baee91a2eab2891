"""Tiny models with random weights, and batches to run them on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, PreTrainedModel, T5Config
from transformers.models.bert import modeling_bert
from transformers.models.t5 import modeling_t5

from hf_synthesizer import list_variants
from hf_synthesizer.synthesizers.registry import get_variant
from tests.helpers.layers import LAYER_CLASSES

MIXTURES = (
    "random+dot_product",
    "dense+dot_product",
    "factorized_random+dot_product",
    "factorized_dense+dot_product",
    "random+dense",
    "random+salience",
    "dense+salience",
    "factorized_dense+salience",
)
CHOOSING = tuple(name for name in list_variants() if get_variant(name).chooses_keys)
WHOLE_SEQUENCE = tuple(name for name in list_variants() if get_variant(name).whole_sequence)
"""The variants for encoders alone."""
RELATIVES = tuple(name for name in CHOOSING if name != "sparse_strided")
"""They differ from `sparse_strided` in the choice alone: `tests/choices/test_choosing.py` holds them to the most telling tests."""
VARIANTS = (*(name for name in list_variants() if name not in RELATIVES), *MIXTURES)
"""What every other test of all variants runs over."""
MAX_LENGTH = 24

BERT_HEADS = (
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)
T5_HEADS = (
    "T5Model",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5ForSequenceClassification",
    "T5ForTokenClassification",
    "T5ForQuestionAnswering",
)
HEADS = (*BERT_HEADS, *T5_HEADS)


def matrix(*heads: str, layers: Iterable[str] = LAYER_CLASSES, **more: Sequence[Any]) -> pytest.MarkDecorator:
    """Every variant on these models of BERT and T5, and on one model of each other layer class.

    `more` names further parameters. Each pair of a variant and a model is tested once, with the combinations of their values in
    turn. So every combination meets every variant and every model.
    """
    models, combinations = (*heads, *layers), list(itertools.product(*more.values()))
    cases = [
        (variant, head, *combinations[(row + column) % len(combinations)])
        for row, variant in enumerate(VARIANTS)
        for column, head in enumerate(models)
    ]
    return pytest.mark.parametrize(("variant", "head", *more), cases)


def bert_config(**changes: Any) -> BertConfig:
    settings: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,
    )
    return BertConfig(**{**settings, **changes})


def t5_config(**changes: Any) -> T5Config:
    settings: dict[str, Any] = dict(
        vocab_size=64,
        d_model=24,
        d_kv=6,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        n_positions=MAX_LENGTH,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )
    return T5Config(**{**settings, **changes})


def build(head: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of the named class, in eval mode, whose biases are not zero."""
    if head in LAYER_CLASSES:
        config = getattr(transformers, LAYER_CLASSES[head].config)(**{**LAYER_CLASSES[head].settings, **changes})
        model = getattr(transformers, head)(config)
    elif head.startswith("Bert"):
        decoder = {"is_decoder": True} if head == "BertLMHeadModel" else {}
        model = getattr(modeling_bert, head)(bert_config(**{**decoder, **changes}))
    else:
        model = getattr(modeling_t5, head)(t5_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def decoder(model_type: str) -> PreTrainedModel:
    """A tiny model that generates."""
    return build({"bert": "BertLMHeadModel", "t5": "T5ForConditionalGeneration"}[model_type])


def batch(head: str, length: int = 8, padding: str = "right") -> dict[str, torch.Tensor]:
    """Inputs that the named class takes, ragged where it takes tokens, and with decoder inputs where it has a decoder."""
    rows = 3
    takes = LAYER_CLASSES[head].takes if head in LAYER_CLASSES else "text"
    if takes == "images":
        return {"pixel_values": torch.randn(rows, 1, 2, 2 * length - 2)}
    if takes == "sound":
        frames = mask(rows, length, padding)
        return {"input_values": torch.randn(rows, 4 * length), "attention_mask": frames.repeat_interleave(4, dim=1)}
    if takes == "features to text":
        target = torch.randint(2, 64, (rows, length - 2))
        return {"input_features": torch.randn(rows, 4, 2 * length), "decoder_input_ids": target}
    inputs = {"input_ids": torch.randint(2, 64, (rows, length)), "attention_mask": mask(rows, length, padding)}
    if head == "BertForMultipleChoice":
        inputs = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
    if head == "T5ForSequenceClassification":
        inputs["input_ids"][:, -1] = 1  # its head reads the end-of-sequence token
    if head in ("T5Model", "T5ForConditionalGeneration") or takes == "text to text":
        inputs["decoder_input_ids"] = torch.randint(2, 64, (rows, length - 2))
    return inputs


def read_by_encoder(head: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    """What the encoder of the named class reads; nothing where there is none."""
    if head.startswith("Whisper"):
        return {"input_features": torch.randn(rows, 4, 16)}
    if head.startswith(("T5", "Bart")):
        return {"input_ids": torch.randint(2, 64, (rows, length))}
    return {}


def mask(rows: int, length: int, padding: str) -> torch.Tensor:
    """Row r has r tokens of padding (or as many as leave one token), on the named side; or none at all ("none")."""
    keep = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        count = min(row, length - 1)
        if padding == "right" and count:
            keep[row, -count:] = 0
        elif padding == "left" and count:
            keep[row, :count] = 0
        elif padding == "full" and row == rows - 1:
            keep[row] = 0
    return keep


def randomize(module: nn.Module, std: float = 0.5) -> nn.Module:
    """Give every parameter and buffer random values, so that no term of a formula hides behind a zero."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                nn.init.normal_(tensor, std=std)
    return module


def first_output(output: Any) -> torch.Tensor:
    """The main tensor of a model's output."""
    return next(output[key] for key in output if key != "loss" and isinstance(output[key], torch.Tensor))


def of_tokens(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rows of an output that belong to tokens: where padding stands is nobody's business (OPT puts it at −1)."""
    keep = inputs.get("attention_mask")
    return output if keep is None or output.shape[:2] != keep.shape else output[keep.bool()]
