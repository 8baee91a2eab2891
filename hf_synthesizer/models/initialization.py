"""Initializes the tensors of patched layers that no checkpoint has filled, when Transformers initializes the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from ..layers.guard import Guard
from ..layers.mixin import SynthesizerMixin
from ..synthesizers import Synthesizer
from ..upstream.transformers_names import LOADED


def initialize_layers(model: PreTrainedModel) -> None:
    """Initialize the tensors of a model's patched layers. Loaded tensors stay.

    This includes layers in stock models inside the model (T5's stacks). Patched models inside it initialize their own layers.
    """
    from .model_mixin import SynthesizerModelMixin

    for layer, owner in list(_layers(model, model)):
        if owner is model:
            _initialize(layer, owner)
        elif not isinstance(owner, SynthesizerModelMixin):
            _initialize(layer, owner)
            for guard in layer.children():
                if isinstance(guard, Guard):
                    model.initialize_guard(guard)  # type: ignore[operator]


def _initialize(layer: SynthesizerMixin, owner: PreTrainedModel) -> None:
    """Initialize one layer.

    The stock initialization expects all stock projections. In a patched layer some are gone, have moved or are cut into parts:
    each part is initialized as the projection that it was.
    """
    if isinstance(layer.synthesizer, Synthesizer):  # a fused layer has a module of another class
        layer.synthesizer.reset_parameters()
    # Some layers have buffers that no checkpoint holds and that only this fills in (Falcon H1's).
    saved = layer.state_dict().keys()
    unsaved = any(name not in saved for name, _ in layer.named_buffers(recurse=False))
    if unsaved or not all(getattr(tensor, LOADED, False) for tensor in layer.parameters()):
        for projections in _stock_projections(layer):
            stock = layer.stock_class.__new__(layer.stock_class)
            stock.__dict__.update(layer.__dict__)
            stock.__dict__["_modules"] = {**layer._modules, **projections}
            owner._init_weights(stock)


def _layers(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[SynthesizerMixin, PreTrainedModel]]:
    """The patched layers in a module, each with the innermost model around it."""
    for child in module.children():
        if isinstance(child, SynthesizerMixin):
            yield child, owner
        else:
            yield from _layers(child, child if isinstance(child, PreTrainedModel) else owner)


def _stock_projections(layer: SynthesizerMixin) -> Iterator[dict[str, nn.Module]]:
    """The query and key projections by their stock names, one part of each after the other; a `Linear` without memory for one
    of which nothing is left."""
    hidden_size, heads, width = layer.dimensions
    names, modules = layer.projection_names, layer._modules
    moved = dict(layer.get_submodule("stock").named_children()) if "stock" in modules else {}
    parts = list(layer.synthesizer.stock_parts()) if isinstance(layer.synthesizer, Synthesizer) else []
    projections: dict[str, list[nn.Module]] = {}
    for name in dict.fromkeys((layer.guard_name, *names.replaced)):
        candidates = [modules.get(name), moved.get(name)]
        if names.fused:  # one projection of queries, keys and values
            candidates += [
                modules.get(names.value),
                moved.get(names.value),
                *(part for pair in parts for part in pair),
            ]
        else:
            candidates += [key if name == names.key else query for query, key in parts]
        left = [module for module in candidates if module is not None and not isinstance(module, Guard)]
        projections[name] = left or [nn.Linear(hidden_size, heads * width, device="meta")]
    for index in range(max(map(len, projections.values()))):
        yield {name: parts_of[min(index, len(parts_of) - 1)] for name, parts_of in projections.items()}
