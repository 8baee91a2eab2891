"""Pictures of recorded weights, learnt tables and measurements: figures of matplotlib, and a page for a browser."""

from .page import attention_page

__all__ = ["attention_page"]
