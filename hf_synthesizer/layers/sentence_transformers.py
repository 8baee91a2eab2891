"""SentenceTransformers: a sequence of modules around one model, with a `max_seq_length` that follows the patch."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .finding.attention_layers import find_attention_layers
from .lengths import max_text_length

_BEFORE = "_synthesizer_max_seq_length"


def model_of_sentences(thing: Any) -> PreTrainedModel | None:
    """The model in a SentenceTransformer; None for everything else, and for one that holds several models."""
    if not isinstance(thing, nn.Sequential) or not hasattr(thing, "max_seq_length"):
        return None
    models = [module for module in thing.modules() if isinstance(module, PreTrainedModel)]
    outermost = [model for model in models if not any(model in list(other.modules())[1:] for other in models)]
    return outermost[0] if len(outermost) == 1 else None


def model_in(thing: Any) -> Any:
    """The model in a SentenceTransformer; everything else as it is."""
    inner = model_of_sentences(thing)
    return thing if inner is None else inner


def shorten_texts(sentences: Any, model: PreTrainedModel) -> None:
    """Let a SentenceTransformer cut its texts at the longest input of its patched model, unless it does so earlier."""
    max_length, before = max_text_length(find_attention_layers(model).layers), sentences.max_seq_length
    if max_length is not None and (before is None or before > max_length):
        sentences.__dict__[_BEFORE] = before
        sentences.max_seq_length = max_length


def lengthen_texts(sentences: Any) -> None:
    """Undo `shorten_texts`."""
    if _BEFORE in sentences.__dict__:
        sentences.max_seq_length = sentences.__dict__.pop(_BEFORE)
