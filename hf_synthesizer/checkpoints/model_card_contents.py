"""The contents of a model card: metadata, which layers were swapped, how many parameters that saved, how to load the model."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
from transformers import PreTrainedModel
from transformers.modelcard import (
    TASK_MAPPING,
    extract_hyperparameters_from_trainer,
    make_markdown_table,
    parse_log_history,
)

from ..layers.finding.attention_layers import AttentionLayers
from ..layers.lengths import max_text_length
from ..layers.patch_report import report_layers
from ..layers.patched import TAGS, stock_class
from ..synthesizers import Synthesizer
from ..synthesizers.config import HeadGroupsConfig, LayerConfig, ranges
from ..synthesizers.mixture import MixtureSynthesizer
from ..synthesizers.parameters import count_parameters
from ..synthesizers.registry import get_variant
from ..version import HOW_TO_INSTALL
from .auto import serving_auto_classes

if TYPE_CHECKING:
    from transformers import Trainer

BEGIN = "<!-- hf_synthesizer: this part is written anew at each save -->"
END = "<!-- hf_synthesizer: end -->"


def card_contents(
    model: PreTrainedModel, attention_layers: AttentionLayers, repo_id: str, trainer: Trainer | None
) -> tuple[dict[str, Any], str]:
    """The metadata of a card (library, tags, base model, task), and our part of its text."""
    variants = _variants(attention_layers)
    metadata = _metadata(model, {name for row in variants for name in row["names"]})
    return metadata, _section(model, attention_layers, variants, repo_id, trainer)


def _metadata(model: PreTrainedModel, variants: set[str]) -> dict[str, Any]:
    data: dict[str, Any] = {"library_name": "transformers", "tags": [*TAGS, *sorted(variants)]}
    if base_model := model.config.synthesizer.get("base_model"):
        data["base_model"] = base_model
    name = stock_class(model).__name__
    mappings: dict[str, Any] = TASK_MAPPING
    if task := next((task for task, mapping in mappings.items() if name in mapping.values()), None):
        data["pipeline_tag"] = task
    return data


def _variants(attention_layers: AttentionLayers) -> list[dict[str, Any]]:
    """One row for each configuration, with the layers that have it."""
    synthesizers: dict[str, Synthesizer] = {}
    stacks: dict[str, dict[str, list[int]]] = {}
    for layer in attention_layers.layers:
        if layer.synthesizer is not None:
            key = json.dumps(layer.synthesizer.config.to_dict(), sort_keys=True)
            synthesizers.setdefault(key, layer.synthesizer)
            stacks.setdefault(key, {}).setdefault(layer.stack, []).append(layer.index)
    rows = []
    for key, synthesizer in synthesizers.items():
        config = synthesizer.config
        settings = {"max_length": config.max_length or "any", **config.non_default()}
        rows.append(
            {
                "variant": config.variant,
                "names": _names(config),
                "formula": _formula(config),
                "weights": f"{count_parameters(synthesizer):,}",
                "layers": "; ".join(f"{stack} {', '.join(map(str, row))}" for stack, row in stacks[key].items()),
                "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
            }
        )
    return rows


def _names(config: LayerConfig) -> set[str]:
    """The variants of a layer, and the parts of its mixtures."""
    if isinstance(config, HeadGroupsConfig):
        return set().union(*map(_names, config.groups))
    return {config.variant, *config.parts}


def _formula(config: LayerConfig) -> str:
    if isinstance(config, HeadGroupsConfig):
        lines = [f"heads {ranges(group.heads or ())}: {_formula(group)}" for group in config.groups]
        if config.stock_heads:
            lines.append(f"heads {ranges(config.stock_heads)}: the stock attention")
        return "<br>".join(lines)
    if len(config.parts) == 1:
        return get_variant(config.variant).formula
    parts = [f"S_{name} = {get_variant(name).formula}" for name in config.parts]
    return "<br>".join([MixtureSynthesizer.formula, *parts])


def _section(
    model: PreTrainedModel,
    attention_layers: AttentionLayers,
    variants: list[dict[str, Any]],
    repo_id: str,
    trainer: Trainer | None,
) -> str:
    """Our part of the text, from the template."""
    report = report_layers(model, attention_layers)
    results: dict[str, Any] = {}
    history, hyperparameters = None, {}
    if trainer is not None:
        _, lines, final = parse_log_history(trainer.state.log_history)
        results = {name: value for name, value in (final or {}).items() if name not in ("epoch", "step")}
        history = make_markdown_table(lines) if lines else None
        hyperparameters = extract_hyperparameters_from_trainer(trainer)
    return _template().render(
        begin=BEGIN,
        end=END,
        repo=repo_id,
        how_to_install=HOW_TO_INSTALL,
        base_model=model.config.synthesizer.get("base_model"),
        stock_class=stock_class(model).__name__,
        auto_class=(serving_auto_classes(model) or [type(model).__name__])[0],
        swapped=len(report.swapped),
        total=len(report.layers),
        variants=variants,
        longest=max_text_length(attention_layers.layers),
        logits_before=sum(layer.before for layer in report.swapped),
        logits_after=sum(layer.after for layer in report.swapped),
        parameters_before=report.parameters_before,
        parameters_after=report.parameters_after,
        results=results,
        history=history,
        hyperparameters=hyperparameters,
    )


@cache
def _template() -> jinja2.Template:
    source = files(__package__).joinpath("templates", "model_card.md").read_text(encoding="utf-8")
    return jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(source)
