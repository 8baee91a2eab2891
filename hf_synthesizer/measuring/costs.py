"""`cost_report`: parameters, operations and cache of a model beside those of its stock model. Nothing is computed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import SequenceTooLongError
from ..layers.caching import bytes_of, self_attention_cache
from ..layers.lengths import max_length_of, position_limit
from ..layers.patch_report import PatchReport, patch_report
from ..layers.patched import is_patched, synthesized_layers
from ..layers.sentence_transformers import model_in
from ..models.classes import stock_of
from .flops import count_flops

LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class Cost:
    """One sequence of `length` tokens: operations of the whole model, and bytes of its cache (0 if it has none)."""

    length: int
    flops: int
    stock_flops: int
    cache_bytes: int
    stock_cache_bytes: int


def describe_patch(report: PatchReport) -> dict[str, Any]:
    """The layers and parameters of a report as a dict that `json.dumps` accepts."""
    return {
        "synthesized": [asdict(layer) for layer in report.swapped],
        "stock": [asdict(layer) for layer in report.left],
        "parameters": report.parameters_after,
        "stock_parameters": report.parameters_before,
    }


@dataclass(frozen=True)
class CostReport:
    """The synthesized layers of a model, and their cost beside stock attention. Prints as two tables.

    `flops` count matrix products over all pairs of tokens (`count_flops` under eager attention). The layers `counted_whole` have
    variants that choose their keys: they compute less than is counted. `costs` is empty for a model that reads no tokens.
    """

    layers: PatchReport
    costs: tuple[Cost, ...]
    counted_whole: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps` accepts."""
        costs = [asdict(cost) for cost in self.costs]
        return {**describe_patch(self.layers), "costs": costs, "counted_whole": list(self.counted_whole)}

    def __str__(self) -> str:
        lines = [str(self.layers), ""]
        if not self.costs:
            return "\n".join([*lines, "No operations are counted: the model does not read tokens."])
        lines.append(f"{'length':>6}  {'GFLOPs':>12}  {'stock':>12}  {'cache, kB':>12}  {'stock':>12}")
        for cost in self.costs:
            numbers = (cost.flops / 1e9, cost.stock_flops / 1e9, cost.cache_bytes / 1e3, cost.stock_cache_bytes / 1e3)
            lines.append(f"{cost.length:>6}  " + "  ".join(f"{number:>12,.3f}" for number in numbers))
        if self.counted_whole:
            names = ", ".join(self.counted_whole)
            lines += ["", f"These layers choose their keys. They compute less than is counted here: {names}."]
        return "\n".join(lines)


def cost_report(model: PreTrainedModel, lengths: Iterable[int] | None = None) -> CostReport:
    """Count parameters, operations and cache of a model at some lengths, beside the stock model.

    Copies without weights are built on the meta device (the model may be on it too), and nothing is computed.

    Args:
        model: a stock or a patched model.
        lengths: in tokens; by default those of 128, 512 and 2048 that fit.

    Raises:
        UnsupportedModelError: if it is no Transformers model.
        SequenceTooLongError: for a length that is longer than the model's maximum.
    """
    model = model_in(model)
    layers = patch_report(model)
    if model.main_input_name != "input_ids":
        return CostReport(layers, ())
    maxima = (max_length_of(model), position_limit(model.config.get_text_config()))
    longest = min((length for length in maxima if length is not None), default=LENGTHS[-1])
    lengths = [length for length in LENGTHS if length <= longest] or [longest] if lengths is None else list(lengths)
    if max(lengths) > longest:
        raise SequenceTooLongError(
            f"Asked for the costs of {max(lengths)} tokens, but this model takes {longest} at most. Name shorter lengths."
        )
    stock_class = stock_of(type(model)) if is_patched(model) else type(model)
    models = (
        _without_weights(type(model), copy.deepcopy(model.config)),
        _without_weights(stock_class, stock_config(model.config)),
    )
    costs = []
    for length in lengths:
        (flops, cache), (stock_flops, stock_cache) = (_measure(one, length) for one in models)
        costs.append(Cost(length, flops, stock_flops, cache, stock_cache))
    return CostReport(layers, tuple(costs), _layers_with_chosen_keys(model))


def stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The stock config of a patched config; a copy of a stock config."""
    if not hasattr(config, "synthesizer"):
        return copy.deepcopy(config)
    values = {name: value for name, value in config.to_dict().items() if name not in ("synthesizer", "auto_map")}
    cls: Any = stock_of(type(config))
    return cls.from_dict({**values, "model_type": cls.model_type})


def _layers_with_chosen_keys(model: PreTrainedModel) -> tuple[str, ...]:
    return tuple(
        name
        for name, layer in synthesized_layers(model)
        if any(getattr(part, "chooses_keys", False) for part in layer.synthesizer.modules())
    )


def _without_weights(cls: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cls(config).to(config.dtype or torch.get_default_dtype()).eval()


@torch.no_grad()
def _measure(model: PreTrainedModel, length: int) -> tuple[int, int]:
    """The operations of one sequence, and the bytes of its cache, under the model's own backend."""
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
    inputs = {"input_ids": tokens, "attention_mask": None}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    flops = count_flops(model, **inputs)
    model.set_attn_implementation(backend)  # weights under eager need all tokens, so that a cache drops fewer
    cache = self_attention_cache(model(**inputs).get("past_key_values"))
    return flops, sum(bytes_of(layer) for layer in getattr(cache, "layers", []))
