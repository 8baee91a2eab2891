"""SentenceTransformers: a series of modules around one model, that says how long its texts may be."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .patched import max_text_length

_BEFORE = "_synthesizer_max_seq_length"


def model_of_sentences(thing: Any) -> PreTrainedModel | None:
    """The model in a SentenceTransformer; None for everything else, and for one that holds several models."""
    if not isinstance(thing, nn.Sequential) or not hasattr(thing, "max_seq_length"):
        return None
    held = [module for module in thing.modules() if isinstance(module, PreTrainedModel)]
    outermost = [model for model in held if not any(model in list(other.modules())[1:] for other in held)]
    return outermost[0] if len(outermost) == 1 else None


def model_in(thing: Any) -> Any:
    """The model in a SentenceTransformer; everything else as it is."""
    inner = model_of_sentences(thing)
    return thing if inner is None else inner


def shorten_texts(sentences: Any, model: PreTrainedModel) -> None:
    """Let a SentenceTransformer cut its texts at the longest input of its patched model, unless it does so earlier."""
    longest, before = max_text_length(model), sentences.max_seq_length
    if longest is not None and (before is None or before > longest):
        sentences.__dict__[_BEFORE] = before
        sentences.max_seq_length = longest


def lengthen_texts(sentences: Any) -> None:
    """Undo `shorten_texts`."""
    if _BEFORE in sentences.__dict__:
        sentences.max_seq_length = sentences.__dict__.pop(_BEFORE)
