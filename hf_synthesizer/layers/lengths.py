"""The longest sequence that a stock model takes, read off its config: tokens of text, patches of an image, frames of audio.

`patched.py` says how long a sequence the layers of a patched model take.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

from ..errors import InvalidConfigError

TEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "max_seq_length")
OF_STACK = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
EXTRA_TOKENS = 2
"""Beside its patches an image may have a class token and a distillation token."""
BESIDE_PATCHES = (
    "num_register_tokens",
    "num_registers",
    "num_detection_tokens",
    "num_queries",
    "num_cls_tokens",
    "n_cls_tokens",
)
"""What else is read along with the patches (DINOv2 with registers, RADIO, YOLOS, EoMT, Pixio)."""
PACKED = ("pixtral",)
"""Types that read the patches of all images as one sequence: no config says how long that is."""


def longest_sequence(config: PreTrainedConfig, stack: str = "encoder") -> int:
    """The longest sequence N of one stack of a model.

    Args:
        config: the attention module's own, which for one tower of a model is that tower's.
        stack: "encoder" or "decoder", where a config has a maximum for each.

    Raises:
        InvalidConfigError: for a config that names none.
    """
    found = known_length(config, stack)
    if found is None:
        raise InvalidConfigError(
            f"{type(config).__name__} names no longest sequence (none of {', '.join(TEXT)}, and no image_size with "
            f"patch_size), so that the size of the position tables is unknown. Say it: patch_model(model, …, "
            f"max_length=1024), with the most tokens, patches or frames that one input will have."
        )
    return found


def known_length(config: PreTrainedConfig, stack: str = "encoder") -> int | None:
    """As `longest_sequence`; None for a config that names none."""
    named = getattr(config, OF_STACK.get(stack, ""), None)
    if isinstance(named, int) and named > 0:
        return named
    if config.model_type in RELATIVE:
        return getattr(config, "n_positions", RELATIVE[config.model_type])
    limit = position_limit(config)
    return _patches(config) if limit is None else limit


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions of text that a config names; None where it names none, or where positions are relative."""
    if config.model_type in RELATIVE:
        return None
    values = (getattr(config, name, None) for name in TEXT)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


RELATIVE = {
    "t5": 512,
    "mt5": 512,
    "longt5": 512,
    "switch_transformers": 512,
    "udop": 512,
    "pop2piano": 512,
    "umt5": 512,
}
"""T5 and its kin know positions relative to each other only; this is the length that their checkpoints were trained at."""


def _patches(config: PreTrainedConfig) -> int | None:
    """How many patches an image or a video has, and the tokens beside them."""
    if config.model_type in PACKED:
        return None
    size, patch = _sides(getattr(config, "image_size", None)), _sides(getattr(config, "patch_size", None))
    if size is None or patch is None:
        return None
    count = 1
    for whole, part in zip(size[-2:], patch[-2:], strict=True):
        count *= max(1, -(-whole // part))
    frames = getattr(config, "num_frames", None)
    if isinstance(frames, int):
        count *= max(1, frames // int(getattr(config, "tubelet_size", 1)))
    return count + EXTRA_TOKENS + sum(int(getattr(config, name, 0) or 0) for name in BESIDE_PATCHES)


def _sides(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, Iterable) and not isinstance(value, (str, dict)):
        sides = [int(side) for side in value]
        return (sides[-2], sides[-1]) if len(sides) >= 2 else None
    return None
