"""Pictures by matplotlib (the extra `plots`): each function returns a `Figure`, and `save` writes it as PNG or SVG.

The colours differ for colour-blind readers too. No figure is registered with pyplot.
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
