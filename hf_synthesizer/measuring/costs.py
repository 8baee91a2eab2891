"""`cost_report`: parameters, operations and cache of a model beside those of its stock self, without computing anything."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import SequenceTooLongError
from ..layers.lengths import position_limit
from ..layers.patch_report import PatchReport, patch_report
from ..layers.patched import is_patched, max_length_of, synthesized_layers
from ..layers.sentence_transformers import model_in
from ..models.classes import stock_of
from .flops import count_flops

LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class Cost:
    """One sequence of `length` tokens: operations of the whole model, and bytes of its cache (0 where it has none)."""

    length: int
    flops: int
    stock_flops: int
    cache_bytes: int
    stock_cache_bytes: int


@dataclass(frozen=True)
class CostReport:
    """What is synthesized, and what that costs beside stock attention. Prints as two tables.

    `flops` count matrix products with every pair of tokens (`count_flops` under eager attention). The layers `counted_whole`
    have variants that choose their keys: what these compute is less, and how much less depends on what they read. `costs` is
    empty for a model that reads no tokens.
    """

    layers: PatchReport
    costs: tuple[Cost, ...]
    counted_whole: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "synthesized": [asdict(layer) for layer in self.layers.swapped],
            "stock": [asdict(layer) for layer in self.layers.left],
            "parameters": self.layers.parameters_after,
            "stock_parameters": self.layers.parameters_before,
            "costs": [asdict(cost) for cost in self.costs],
            "counted_whole": list(self.counted_whole),
        }

    def __str__(self) -> str:
        lines = [str(self.layers), ""]
        if not self.costs:
            return "\n".join([*lines, "No operations are counted: the model does not read tokens."])
        lines.append(f"{'length':>6}  {'GFLOPs':>12}  {'stock':>12}  {'cache, kB':>12}  {'stock':>12}")
        for cost in self.costs:
            numbers = (cost.flops / 1e9, cost.stock_flops / 1e9, cost.cache_bytes / 1e3, cost.stock_cache_bytes / 1e3)
            lines.append(f"{cost.length:>6}  " + "  ".join(f"{number:>12,.3f}" for number in numbers))
        if self.counted_whole:
            lines += [
                "",
                f"Counted as if every query looked at every key, which is more than they compute, for they choose their keys: "
                f"{', '.join(self.counted_whole)}.",
            ]
        return "\n".join(lines)


def cost_report(model: PreTrainedModel, lengths: Iterable[int] | None = None) -> CostReport:
    """What of a model is synthesized, and what that costs at some lengths, beside the stock model.

    Copies without weights are built on the meta device, where the model itself may be too, and nothing is computed.

    Args:
        model: a stock or a patched model.
        lengths: in tokens; by default 128, 512 and 2048, as far as the model can take them.

    Raises:
        UnsupportedModelError: for what is no Transformers model.
        SequenceTooLongError: for a length that the model was not patched for.
    """
    model = model_in(model)
    layers = patch_report(model)
    if model.main_input_name != "input_ids":
        return CostReport(layers, ())
    longest = _longest(model)
    chosen: Sequence[int] = list(lengths) if lengths is not None else [n for n in LENGTHS if n <= longest] or [longest]
    if max(chosen) > longest:
        raise SequenceTooLongError(
            f"Asked for the costs of {max(chosen)} tokens, but this model takes {longest} at most. Name shorter lengths."
        )
    ours, stock = _outline(model, type(model), model.config), _stock_outline(model)
    return CostReport(layers, tuple(_cost(length, ours, stock) for length in chosen), _choosing(model))


def stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that a patched one was made of; a copy of a stock one."""
    if not hasattr(config, "synthesizer"):
        return copy.deepcopy(config)
    values = {name: value for name, value in config.to_dict().items() if name not in ("synthesizer", "auto_map")}
    cls: Any = stock_of(type(config))
    return cls.from_dict({**values, "model_type": cls.model_type})


def _choosing(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the layers some heads of which choose their keys."""
    return tuple(
        name
        for name, layer in synthesized_layers(model)
        if any(getattr(part, "chooses_keys", False) for part in layer.synthesizer.modules())
    )


def _longest(model: PreTrainedModel) -> int:
    lengths = (max_length_of(model), position_limit(model.config.get_text_config()))
    return min((length for length in lengths if length is not None), default=LENGTHS[-1])


def _outline(model: PreTrainedModel, cls: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        built = cls(config).to(config.dtype or torch.get_default_dtype())
    return built.eval()


def _stock_outline(model: PreTrainedModel) -> PreTrainedModel:
    cls = stock_of(type(model)) if is_patched(model) else type(model)
    return _outline(model, cls, stock_config(model.config))


def _cost(length: int, ours: PreTrainedModel, stock: PreTrainedModel) -> Cost:
    flops, cached = zip(*(_measure(model, length) for model in (ours, stock)), strict=True)
    return Cost(length, *flops, *cached)


@torch.no_grad()
def _measure(model: PreTrainedModel, length: int) -> tuple[int, int]:
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
    inputs = {"input_ids": tokens, "attention_mask": None}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    output = model(**inputs)
    cache = output.get("past_key_values")
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return count_flops(model, **inputs), sum(tensor.nbytes for tensor in held)
