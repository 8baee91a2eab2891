"""One tower of a larger model, built from the checkpoint of the whole: which of the described layers are its own.

A description calls stacks as the whole model does ("vision_model", "text_model"). A part has fewer of them, and may call its only
one otherwise ("encoder").
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CheckpointMismatchError
from ..layers.attention_layers import AttentionLayer


def stacks_here(described: Iterable[str], attention_layers: Iterable[AttentionLayer]) -> dict[str, str]:
    """What a part of a model calls the stacks that a description names as the whole does; a stack that is not there keeps its name.

    Args:
        described: the stacks of the description, patched or not.
        attention layers: the layers that the part has.

    Raises:
        CheckpointMismatchError: where none of the part's stacks is described.
    """
    described, here = list(described), {attention_layer.stack: attention_layer for attention_layer in attention_layers}
    names = {stack: stack for stack in described}
    for stack, attention_layer in here.items():
        if stack in described:
            continue
        found = [name for name in described if name in attention_layer.name.split(".")]
        if not found and len(described) == len(here) == 1:  # the description of this tower alone
            found = described
        if len(found) == 1:
            names[found[0]] = stack
    if here and not here.keys() & set(names.values()):
        raise CheckpointMismatchError(
            f"config.json describes the stacks {', '.join(described)}, but this model has {', '.join(here)} and none of those: it "
            f"is the checkpoint of another model, or of a larger one. Load it with the class that its 'architectures' name, and "
            f"take the part from that model."
        )
    return names
