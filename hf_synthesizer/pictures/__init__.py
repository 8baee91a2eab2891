"""What attention looks at, to be seen: recorded weights, learnt tables, and a page to touch them in."""

from .page import attention_page

__all__ = ["attention_page"]
