"""Patched layers are initialised where Transformers initialises the modules of a model: what no checkpoint has filled."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from ..layers.guard import Guard
from ..layers.mixin import SynthesizerMixin
from ..synthesizers import Synthesizer
from ..upstream.transformers_names import LOADED


def initialize_layers(model: PreTrainedModel) -> None:
    """Give the tensors of a model's patched layers the values that they begin with; those that were loaded stay.

    Layers in stock models inside the model are among them (T5's stacks), and those in patched ones are not: they come with theirs.
    """
    from ..models.model_mixin import SynthesizerModelMixin

    for layer, owner in list(_layers(model, model)):
        if owner is model:
            _initialize(layer, owner)
        elif not isinstance(owner, SynthesizerModelMixin):
            _initialize(layer, owner)
            for guard in layer.children():
                if isinstance(guard, Guard):
                    model.initialize_guard(guard)  # type: ignore[operator]


def _initialize(layer: SynthesizerMixin, owner: PreTrainedModel) -> None:
    """The stock initialisation expects all of the stock projections, and in a patched layer some are gone, have moved or are
    cut into parts: each part is initialised as the projection that it was.
    """
    if isinstance(layer.synthesizer, Synthesizer):  # a fused layer has something else there
        layer.synthesizer.reset_parameters()
    # Some layers have buffers that no checkpoint holds, which nobody else fills in (Falcon H1's).
    saved = layer.state_dict().keys()
    unsaved = any(name not in saved for name, _ in layer.named_buffers(recurse=False))
    if unsaved or not all(getattr(tensor, LOADED, False) for tensor in layer.parameters()):
        for projections in _stock_projections(layer):
            stock = layer.stock_class.__new__(layer.stock_class)
            stock.__dict__.update(layer.__dict__)
            stock.__dict__["_modules"] = {**layer._modules, **projections}
            owner._init_weights(stock)


def _layers(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[SynthesizerMixin, PreTrainedModel]]:
    """The patched layers in a module, and for each the innermost model that it is in."""
    for child in module.children():
        if isinstance(child, SynthesizerMixin):
            yield child, owner
        else:
            yield from _layers(child, child if isinstance(child, PreTrainedModel) else owner)


def _stock_projections(layer: SynthesizerMixin) -> Iterator[dict[str, nn.Module]]:
    """The query and key projections by their stock names, one part of each after the other; where nothing is left of one,
    a `Linear` without memory."""
    hidden_size, heads, width = layer.dimensions
    projection_names, there = layer.projection_names, layer._modules
    moved = dict(layer.get_submodule("stock").named_children()) if "stock" in there else {}
    parts = list(layer.synthesizer.stock_parts()) if isinstance(layer.synthesizer, Synthesizer) else []
    projections: dict[str, list[nn.Module]] = {}
    for name in dict.fromkeys((layer.guard_name, *projection_names.replaced)):
        found = [there.get(name), moved.get(name)]
        if projection_names.fused:  # which makes queries, keys and values
            found += [
                there.get(projection_names.value),
                moved.get(projection_names.value),
                *(part for pair in parts for part in pair),
            ]
        else:
            found += [key if name == projection_names.key else query for query, key in parts]
        left = [module for module in found if module is not None and not isinstance(module, Guard)]
        projections[name] = left or [nn.Linear(hidden_size, heads * width, device="meta")]
    for index in range(max(map(len, projections.values()))):
        yield {name: modules[min(index, len(modules) - 1)] for name, modules in projections.items()}
