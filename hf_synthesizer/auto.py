"""What Transformers' Auto classes have to know of patched models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

if TYPE_CHECKING:
    from .families.registry import Family


def register_auto_classes(family: Family) -> None:
    """Register the patched classes with each Auto class that serves the stock class."""
    config_class, stock_config = family.config_class, family.stock_config
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_class in vars(modeling_auto).values():
        mapping = getattr(auto_class, "_model_mapping", None) if isinstance(auto_class, type) else None
        if mapping is None or stock_config not in mapping:
            continue
        stock = mapping[stock_config]
        patched = family.models.get(stock)
        if patched is not None:
            auto_class.register(config_class, patched, exist_ok=True)
    if stock_config in TOKENIZER_MAPPING:
        AutoTokenizer.register(config_class, tokenizer_class=TOKENIZER_MAPPING[stock_config], exist_ok=True)
