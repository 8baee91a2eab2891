"""The layer that keeps the stock forward, for stock classes that no layer class serves and for dot products."""

from .layer import StockForwardLayer

__all__ = ["StockForwardLayer"]
