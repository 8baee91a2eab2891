"""Attention to be seen: recorded weights and learnt tables, as figures of matplotlib and as a page in a browser."""

from .page import attention_page

__all__ = ["attention_page"]
