"""What the tests of transfer start from: teachers, students, and text for them."""

from __future__ import annotations

import copy

import torch

from hf_synthesizer import (
    patch_model,
)
from tests.helpers.models import batch, build, mask

HEADS = {"bert": "BertForSequenceClassification", "t5": "T5ForConditionalGeneration"}


def loader(head: str, count: int = 4, length: int = 8) -> list[dict[str, torch.Tensor]]:
    batches = []
    for _ in range(count):
        inputs = batch(head, length)
        inputs["attention_mask"] = mask(3, length, "right")
        batches.append(inputs)
    return batches


def sharp(head: str):
    """A model whose attention is far from uniform, so that there is something to transfer."""
    model = build(head)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight", "SelfAttention.q.weight", "SelfAttention.k.weight")):
                parameter.mul_(3)
    return model


def student_of(teacher, variant, **options):
    return patch_model(copy.deepcopy(teacher), variant, **options)


def self_attentions(model, kind=None):
    return [m for m in model.modules() if hasattr(m, "synthesizer") and (kind is None or isinstance(m, kind))]


def recorded_weights(teacher, inputs) -> list[torch.Tensor]:
    teacher.set_attn_implementation("eager")
    with torch.no_grad():
        weights = teacher(**inputs, output_attentions=True).attentions
    teacher.set_attn_implementation("sdpa")
    return list(weights)
