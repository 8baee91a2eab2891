"""`variants` and `model-types`: list what the library knows."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .console import show
from .options import Json


def variants(
    name: Annotated[str | None, typer.Argument(help="Describe this variant and its options.")] = None,
    json: Json = False,
) -> None:
    """List the variants of synthesized attention with their formulas, parameters and options.

    \b
    Examples:
      hf-synthesizer variants --json
      hf-synthesizer variants factorized_random
    """
    from ..synthesizers import list_variants
    from ..synthesizers.registry import get_variant

    classes = {variant: get_variant(variant) for variant in ([name] if name else list_variants())}
    facts_by_variant: dict[str, dict[str, Any]] = {
        variant: {
            "formula": cls.formula,
            "parameters": cls.parameter_formula,
            "options": sorted(cls.options),
            "mixes": not cls.chooses_keys,
            "documentation": cls.documentation(),
        }
        for variant, cls in classes.items()
    }
    lines = [f"{'variant':20}S[h, i, j]"]
    for variant, facts in facts_by_variant.items():
        options = f"   options: {', '.join(facts['options'])}" if facts["options"] else ""
        lines += [f"{variant:20}{facts['formula']}", f"{'':20}parameters: {facts['parameters']}{options}"]
    if name:
        lines += ["", facts_by_variant[name]["documentation"]]
        lines += [f"{key} = {option.default}: {option.help}" for key, option in classes[name].options.items()]
    else:
        lines.append("A mixture adds the logits of several: random+dot_product.")
    show(facts_by_variant, "\n".join(lines), json)


def model_types(json: Json = False) -> None:
    """List the model types that can be patched, and the layer class that serves each.

    \b
    Example:
      hf-synthesizer model-types | grep llama
    """
    from ..layers import list_model_types
    from ..layers.finding.model_types import served_types

    layers = served_types()
    layer_classes = {name: layers.get(name, "registered") for name in list_model_types()}
    show(layer_classes, "\n".join(f"{name:32}{layer_class}" for name, layer_class in layer_classes.items()), json)


COMMANDS = (variants, model_types)
