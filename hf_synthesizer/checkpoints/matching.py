"""Checks that a checkpoint has the tensors that its config.json describes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import CheckpointMismatchError
from ..layers.patched import synthesized_layers


def require_match(model: PreTrainedModel, info: dict[str, Any], checkpoint: Any, ignore_mismatched: bool) -> None:
    """Compare the loaded tensors with the description in `config.json`.

    Raises:
        CheckpointMismatchError: for a tensor of a patched layer that is missing, has another shape or has no place,
            and for any other tensor of another shape unless `ignore_mismatched`.
    """
    patched = tuple(f"{name}." for name, _ in synthesized_layers(model))
    missing = sorted(key for key in info["missing_keys"] if key.startswith(patched))
    if missing:
        raise CheckpointMismatchError(
            f"The checkpoint {str(checkpoint)!r} lacks {len(missing)} tensors of its synthesized layers, among them "
            f"{missing[0]!r}; its config.json promises them. If it is a stock checkpoint, load it with the stock class "
            f"and patch it with patch_model(), or use from_pretrained_patched(); else save it again from the model."
        )
    present = tuple(dict(model.named_modules()))
    for key in sorted(info["unexpected_keys"]):
        layer, separator, _ = key.partition(".synthesizer.")
        # A head may lack a stack of the checkpoint: its tensors are no error.
        if key.startswith(patched) or separator and any(n == layer or n.endswith(f".{layer}") for n in present):
            raise CheckpointMismatchError(
                f"The checkpoint {str(checkpoint)!r} holds the tensor {key!r}, for which the field 'synthesizer' of its "
                f"config.json has no place. Repair that field, or save the checkpoint again from the model."
            )
    for key, shape, expected in sorted(info["mismatched_keys"]):
        ours = ".synthesizer." in key or key.startswith(patched)
        if ours or not ignore_mismatched:
            remedy = (
                "Repair the field 'synthesizer' of config.json (max_length, rank, factors and share_heads decide the "
                "shape), or save the checkpoint again from the model."
                if ours
                else "Repair config.json, or pass ignore_mismatched_sizes=True to start this tensor afresh."
            )
            raise CheckpointMismatchError(
                f"In the checkpoint {str(checkpoint)!r} the tensor {key!r} has the shape {tuple(shape)}, but its "
                f"config.json asks for {tuple(expected)}. {remedy}"
            )
