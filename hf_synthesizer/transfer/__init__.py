"""Teach synthesized layers the attention of the stock layers, and suggest which layers or heads to synthesize."""

from .report import LayerTransfer, TransferReport
from .run import transfer_attention
from .suggest import suggest_heads, suggest_layers
from .suggestion import Suggestion

__all__ = [
    "LayerTransfer",
    "Suggestion",
    "TransferReport",
    "suggest_heads",
    "suggest_layers",
    "transfer_attention",
]
