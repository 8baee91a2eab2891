"""Synthesized attention layers: they are found (`finding`), have a forward signature (`signatures`) or the stock forward."""

from . import signatures
from .finding.layer_classes import find_layer_class, register_layer, synthesizer_class
from .finding.model_types import ModelType, list_model_types, model_type_of, register_model_type

__all__ = [
    "ModelType",
    "find_layer_class",
    "list_model_types",
    "model_type_of",
    "register_layer",
    "register_model_type",
    "signatures",
    "synthesizer_class",
]
