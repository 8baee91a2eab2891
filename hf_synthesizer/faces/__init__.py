"""The faces that Transformers models see: one forward signature each. What a model needs is found from its own code."""

from . import bart, bert, gpt, plain, rotary, t5
from .attention import find_face, register_face, synthesizer_class
from .registry import Family, family_of, is_attention, list_families, register_family

__all__ = [
    "Family",
    "bart",
    "bert",
    "family_of",
    "find_face",
    "gpt",
    "is_attention",
    "list_families",
    "plain",
    "register_face",
    "register_family",
    "rotary",
    "synthesizer_class",
    "t5",
]
