"""What a model card says of a patched model: its metadata, what was swapped, what it cost, how to load it."""

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

from ..layers.finding.attention_layers import find_attention_layers
from ..layers.mixin import SynthesizerMixin
from ..layers.patch_report import patch_report
from ..layers.patched import TAGS, max_text_length, stock_class
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


def card_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """The metadata: library, tags, base model and task."""
    variants = {name for row in _variants(model) for name in row["names"]}
    data: dict[str, Any] = {"library_name": "transformers", "tags": [*TAGS, *sorted(variants)]}
    if base_model := model.config.synthesizer.get("base_model"):
        data["base_model"] = base_model
    name = stock_class(model).__name__
    mappings: dict[str, Any] = TASK_MAPPING
    if task := next((task for task, mapping in mappings.items() if name in mapping.values()), None):
        data["pipeline_tag"] = task
    return data


def _variants(model: PreTrainedModel) -> list[dict[str, Any]]:
    """One row for each configuration that some layers share."""
    layers: dict[str, list[SynthesizerMixin]] = {}
    names: dict[str, dict[str, list[int]]] = {}
    for attention_layer in find_attention_layers(model)[0]:
        if isinstance(attention_layer.module, SynthesizerMixin):
            key = json.dumps(attention_layer.module.synthesizer.config.to_dict(), sort_keys=True)
            layers.setdefault(key, []).append(attention_layer.module)
            names.setdefault(key, {}).setdefault(attention_layer.stack, []).append(attention_layer.index)
    rows = []
    for key, modules in layers.items():
        config = modules[0].synthesizer.config
        settings = {"max_length": config.max_length, **config.non_default()}
        rows.append(
            {
                "variant": config.variant,
                "names": _names(config),
                "formula": _formula(config),
                "weights": f"{count_parameters(modules[0].synthesizer):,}",
                "layers": "; ".join(f"{stack} {', '.join(map(str, row))}" for stack, row in names[key].items()),
                "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
            }
        )
    return rows


def _names(config: LayerConfig) -> set[str]:
    """The variants, and the parts of mixtures, that a layer has."""
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


def card_section(model: PreTrainedModel, repo_id: str, trainer: Trainer | None) -> str:
    """Our part, from the template."""
    report = patch_report(model)
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
        variants=_variants(model),
        longest=max_text_length(model),
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
