"""Make a pretrained model survive the swap: teach the synthesized layers what the stock ones attended to."""

from .report import LayerTransfer, TransferReport
from .run import transfer_attention
from .suggest import suggest_heads, suggest_layers
from .suggestion import HeadSuggestion, Suggestion

__all__ = [
    "HeadSuggestion",
    "LayerTransfer",
    "Suggestion",
    "TransferReport",
    "suggest_heads",
    "suggest_layers",
    "transfer_attention",
]
