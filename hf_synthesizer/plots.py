"""Pictures by matplotlib (the extra `plots`): each function returns a `Figure`, and `save` writes it as PNG or SVG.

Colours are told apart by those who see red and green alike, and no figure is registered anywhere.
"""

from .pictures.attention import plot_attention
from .pictures.curves import plot_suggestion, plot_training, plot_transfer
from .pictures.figures import save
from .pictures.learnt import plot_synthesizer
from .pictures.lengths import plot_lengths

__all__ = [
    "plot_attention",
    "plot_lengths",
    "plot_suggestion",
    "plot_synthesizer",
    "plot_training",
    "plot_transfer",
    "save",
]
