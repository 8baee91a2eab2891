"""Pictures by matplotlib (the extra `plots`): each function returns a `Figure`, and `save` writes it as PNG or SVG.

Colours are told apart by those who see red and green alike, and no figure is registered anywhere.
"""

from .attention import plot_attention
from .curves import plot_suggestion, plot_training, plot_transfer
from .figures import save
from .learnt import plot_synthesizer
from .lengths import plot_lengths

__all__ = [
    "plot_attention",
    "plot_lengths",
    "plot_suggestion",
    "plot_synthesizer",
    "plot_training",
    "plot_transfer",
    "save",
]
