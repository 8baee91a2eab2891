"""Make a pretrained model survive the swap: teach the synthesized layers what the stock ones attended to."""

from .report import LayerTransfer, TransferReport
from .run import transfer_attention
from .suggest import Suggestion, suggest_layers

__all__ = ["LayerTransfer", "Suggestion", "TransferReport", "suggest_layers", "transfer_attention"]
