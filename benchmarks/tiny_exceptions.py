"""What the one rule for tiny models (`tiny_models.py`) does not know of single model types."""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 99, "pad_token_id": 1},
}
"""Fields of a type's config; under the name of a sub-config, its fields, with a `model_type` where it may be any."""
MODELS: dict[str, str] = {}
"""The class that stands for a type, where the first that is found does not."""
INPUTS: dict[str, dict[str, Any]] = {}
"""Functions that make a type's inputs, by their names."""
