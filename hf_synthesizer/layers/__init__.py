"""The layer classes that Transformers models see: one forward signature each. What a model needs is found from its own code."""

from . import bart, bert, gpt, plain, rotary, t5
from .layer_classes import find_layer_class, register_layer, synthesizer_class
from .model_types import ModelType, is_attention, list_model_types, model_type_of, register_model_type

__all__ = [
    "ModelType",
    "bart",
    "bert",
    "model_type_of",
    "find_layer_class",
    "gpt",
    "is_attention",
    "list_model_types",
    "plain",
    "register_layer",
    "register_model_type",
    "rotary",
    "synthesizer_class",
    "t5",
]
