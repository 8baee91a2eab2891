"""The layer classes: one for each forward signature of stock attention. The import registers them."""

from . import bart, bert, gpt, plain, rotary, t5

__all__ = ["bart", "bert", "gpt", "plain", "rotary", "t5"]
