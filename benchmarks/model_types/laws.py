"""What must hold for a synthesized model, whatever its type: the laws that `survey.py` checks.

Each law takes a stock model and its inputs, patches and unpatches it, and returns `HOLDS`, a word on why it says nothing
here (in brackets), or what was wrong. Our own errors pass through: they are refusals.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.model_types.tiny_models import Inputs, run, tensors_of
from hf_synthesizer import models, patch_model, unpatch_model
from hf_synthesizer.checkpoints.auto import serving_auto_classes
from hf_synthesizer.layers.finding.projections import find_projection_names, out_features
from hf_synthesizer.layers.mixin import SynthesizerMixin

HOLDS = "holds"
TOLERANCE = 1e-5
"""Of float32, relative to the largest number of a tensor, or to 1."""
CACHED = ("random+salience", "dense")


@dataclass
class Subject:
    """A stock model, its inputs, the layers that are patched, and what else `patch_model` is told."""

    model: PreTrainedModel
    inputs: Inputs
    layers: frozenset[str]
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def patched(self, variant: str, **options: Any) -> Iterator[PreTrainedModel]:
        """The model, patched as long as this lasts."""
        patch_model(
            self.model, variant, layers=lambda name, module: name in self.layers, **{**self.options, **options}
        )
        try:
            with torch.no_grad():
                yield self.model
        finally:
            unpatch_model(self.model)


def equals_stock(subject: Subject) -> str:
    """`dot_product` alone, and beside `random` under "sum", which starts at zero, compute what stock computes."""
    with torch.no_grad():
        expected = run(subject.model, subject.inputs)
    for variant, options in (("dot_product", {}), ("random+dot_product", {"mixing": "sum"})):
        with subject.patched(variant, **options) as model:
            found = run(model, subject.inputs)
        wrong = difference(expected, found, subject.inputs)
        if wrong:
            return f"{variant}: {wrong}"
    return HOLDS


def values_equal_stock(subject: Subject) -> str:
    """Where all logits are 0, stock and `random` attend evenly: what is left are values, masks, windows and biases.

    This is what an own layer class writes anew, and `equals_stock`, by way of the stock forward, does not see. Under eager.
    """
    modules = [subject.model.get_submodule(name) for name in sorted(subject.layers)]
    if any(find_projection_names(module) is None for module in modules):
        return "(projections of unknown names)"
    with (
        eager(subject.model),
        queries_of_zero(modules),
    ):  # of the layer that keeps the stock forward too: the projection may make a gate as well
        with torch.no_grad():
            expected = run(subject.model, subject.inputs)
        with subject.patched("random") as model:
            for _, module in synthesized(model):
                for parameter in module.synthesizer.parameters():
                    nn.init.zeros_(parameter)
            found = run(model, subject.inputs)
    return difference(expected, found, subject.inputs) or HOLDS


def ignores_input(subject: Subject) -> str:
    """The weights of `random` are the same for two inputs of one shape."""
    other = {name: _other(tensor) if name in CONTENT else tensor for name, tensor in subject.inputs.items()}
    with eager(subject.model), subject.patched("random") as model:
        _randomize(model)
        first, second = (recorded(model, inputs) for inputs in (subject.inputs, other))
    if not first or len(first) != len(second):
        return "the layers returned no weights under eager, or took another way"
    wrong = sum(not a.agrees_with(b) for a, b in zip(first, second, strict=True))
    return f"{wrong} of {len(first)} layers look at their input" if wrong else HOLDS


def no_future(subject: Subject) -> str:
    """Where stock lets no output depend on a later token, nor does the patched model."""
    name = sequence_of(subject.inputs)
    if name is None:
        return "(no sequence of tokens)"
    inputs = {key: value for key, value in subject.inputs.items() if key != "attention_mask"}
    tokens = inputs[name]
    cut = tokens.shape[1] - 3
    changed = {**inputs, name: torch.cat([tokens[:, :cut], _other(tokens)[:, cut:]], dim=1)}

    def leaks(model: PreTrainedModel) -> bool:
        pairs = zip(run(model, inputs), run(model, changed), strict=True)
        earlier = [(a[:, :cut], b[:, :cut]) for a, b in pairs if a.dim() > 2 and a.shape[:2] == tokens.shape]
        return not earlier or any(_far(a, b) for a, b in earlier)

    with torch.no_grad():
        if leaks(subject.model):
            return "(no decoder)"
    for variant in CACHED:
        with subject.patched(variant) as model:
            _randomize(model)
            if leaks(model):
                return f"{variant}: an output depends on a later token"
    return HOLDS


def cached_equals_uncached(subject: Subject) -> str:
    """A prefill and single steps with a cache give what one pass gives, where they do so in stock."""
    name = sequence_of(subject.inputs)
    inputs = {key: value for key, value in subject.inputs.items() if key != "attention_mask"}
    if name is None:
        return "(no sequence of tokens)"
    try:
        with torch.no_grad():
            wrong = _cached(subject.model, inputs, name)
    except Exception:  # noqa: BLE001 - stock has no cache, or no single steps
        return "(stock takes no single steps)"
    if wrong:
        return f"(stock itself: {wrong})"
    for variant in ("random", *CACHED, "random+dot_product"):
        with subject.patched(variant) as model:
            _randomize(model)
            wrong = _cached(model, inputs, name)
        if wrong:
            return f"{variant}: {wrong}"
    return HOLDS


def gradients_arrive(subject: Subject) -> str:
    """Each synthesizer learns, and from numbers, if the stock layer does: codes between encoder and decoder stop gradients."""
    for variant in ("random", "dense"):
        with subject.patched(variant) as model, torch.enable_grad():
            _randomize(model)
            _backward(model, subject.inputs)
            wrong = {
                name: found for name, module in synthesized(model) if (found := _what_is_wrong(module.synthesizer))
            }
            model.zero_grad()
        if wrong:
            _backward(subject.model, subject.inputs)
            learns = {
                name
                for name in wrong
                if any(p.grad is not None for p in subject.model.get_submodule(name).parameters())
            }
            subject.model.zero_grad()
            if learns:
                return f"{variant}: {wrong[min(learns)]} in {min(learns)}"
    return HOLDS


def _backward(model: PreTrainedModel, inputs: Inputs) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(0)
    tensors = [tensor for tensor in run(model, inputs) if tensor.requires_grad]
    sum((tensor.float() * torch.randn(tensor.shape, generator=generator)).sum() for tensor in tensors).backward()


def _what_is_wrong(synthesizer: nn.Module) -> str | None:
    gradients = [parameter.grad for parameter in synthesizer.parameters() if parameter.requires_grad]
    if any(gradient is None for gradient in gradients):
        return "no gradient"
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return "a gradient that is no number"
    return None if any(bool(gradient.any()) for gradient in gradients) else "a gradient of zero"


def unpatch_is_exact(subject: Subject) -> str:
    """After `unpatch_model` the model is what it was, bit for bit."""
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    with torch.no_grad():
        expected = run(subject.model, subject.inputs)
    with subject.patched("random+dense") as model:
        run(model, subject.inputs)
    after = subject.model.state_dict()
    if before.keys() != after.keys() or not all(torch.equal(before[name], after[name]) for name in before):
        return "the weights differ"
    with torch.no_grad():
        found = run(subject.model, subject.inputs)
    return HOLDS if all(map(torch.equal, expected, found)) else "the outputs differ"


def saved_equals_loaded(subject: Subject) -> str:
    """A checkpoint loads into its own class, by its name and through an Auto class, and computes the same."""
    for variant in ("random+salience", "random+dot_product"):
        with subject.patched(variant) as model, tempfile.TemporaryDirectory() as folder:
            _randomize(model)
            expected = run(model, subject.inputs)
            model.save_pretrained(folder)
            loaders = [getattr(models, type(model).__name__)]
            served = [name for name in serving_auto_classes(model) if name.startswith("AutoModel")]
            loaders += [getattr(transformers, name) for name in served[:1]]
            for loader in loaders:
                loaded = loader.from_pretrained(folder).eval()
                if type(loaded) is not type(model):
                    return f"{loader.__name__} made a {type(loaded).__name__}"
                wrong = difference(expected, run(loaded, subject.inputs), subject.inputs)
                if wrong:
                    return f"{variant}, {loader.__name__}: {wrong}"
    return HOLDS


LAWS: dict[str, Callable[[Subject], str]] = {
    law.__name__: law
    for law in (
        equals_stock,
        values_equal_stock,
        ignores_input,
        no_future,
        cached_equals_uncached,
        gradients_arrive,
        unpatch_is_exact,
        saved_equals_loaded,
    )
}
CONTENT = ("input_ids", "decoder_input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features")
"""The inputs that hold what the model is to look at."""


def synthesized(model: nn.Module) -> list[tuple[str, SynthesizerMixin]]:
    """The patched layers of a model."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, SynthesizerMixin)]


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """As long as this lasts, the model attends step by step, and its layers return their weights."""
    found = [getattr(module, "config", None) for module in model.modules()]
    before = {
        id(config): (config, config._attn_implementation) for config in found if isinstance(config, PreTrainedConfig)
    }
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, backend in before.values():  # the parts of a model may have backends of their own
            config._attn_implementation = backend


@contextmanager
def queries_of_zero(modules: Iterable[nn.Module]) -> Iterator[None]:
    """As long as this lasts, these stock attention layers make queries of zero."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for module in modules:
            projection_names = find_projection_names(module)
            projection = module.get_submodule(projection_names.fused or projection_names.query)
            rows: Any = slice(None)
            if projection_names.rows is not None:
                rows = projection_names.rows(module, out_features(projection))["query"]
            changed = [projection.weight if hasattr(projection, "out_features") else projection.weight.t()]
            changed += [projection.bias] if getattr(projection, "bias", None) is not None else []
            for tensor in changed:
                before.append((tensor, tensor.clone()))
                tensor[rows] = 0
            for name, parameter in module.named_parameters():
                if re.search(r"q\w*norm.*bias", name):  # a norm of zero is its bias
                    before.append((parameter, parameter.clone()))
                    parameter.zero_()
        try:
            yield
        finally:
            for tensor, value in before:
                tensor.copy_(value)


@dataclass
class Record:
    """What one patched layer was given as mask, what logits it made, and the weights that it returned."""

    mask: torch.Tensor | None
    logits: torch.Tensor
    weights: torch.Tensor

    def agrees_with(self, other: Record) -> bool:
        """Whether the logits are the same, as far as both sequences reach (LightGlue finds another number of points in
        another image), and the weights where the masks are, which a model may make of its input (EoMT)."""
        queries, keys = (min(self.logits.shape[dim], other.logits.shape[dim]) for dim in (-2, -1))
        if not torch.equal(self.logits[..., :queries, :keys], other.logits[..., :queries, :keys]):
            return False
        if self.weights.shape != other.weights.shape:
            return self.logits.shape != other.logits.shape
        both = self.mask is not None and other.mask is not None
        return torch.equal(self.weights, other.weights) or (both and not torch.equal(self.mask, other.mask))


def recorded(model: PreTrainedModel, inputs: Inputs) -> list[Record]:
    """What the patched layers did, as far as they return their weights (B, H, Lq, Lk)."""
    records: list[Record] = []
    made: list[torch.Tensor] = []

    def keep(module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        given = inspect.signature(module.forward).bind(*arguments, **named).arguments
        mask = given.get("attention_mask", given.get("mask"))
        found = [part for part in output if isinstance(part, torch.Tensor) and part.dim() == 4]
        records.extend(Record(mask, made[-1], part) for part in found[-1:] if part.shape[1] == module.dimensions[1])

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for _, module in synthesized(model)]
    hooks += [
        module.synthesizer.register_forward_hook(lambda module, arguments, logits: made.append(logits.materialize()))
        for _, module in synthesized(model)
    ]
    try:
        run(model, inputs, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    return records


def difference(expected: list[torch.Tensor], found: list[torch.Tensor], inputs: Inputs) -> str | None:
    """What is wrong between two outputs; what stands at padding does not count."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        return "the outputs have other shapes"
    mask = inputs.get("attention_mask")
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if mask is not None and a.shape[: mask.dim()] == mask.shape:
            a, b = a[mask.bool()], b[mask.bool()]
        worst = max(worst, _distance(a, b))
    return None if worst <= TOLERANCE else f"off by {worst:.1e}"


def sequence_of(inputs: Inputs) -> str | None:
    """The input whose tokens the last stack reads one after the other."""
    return next((name for name in ("decoder_input_ids", "input_ids") if name in inputs), None)


def _cached(model: PreTrainedModel, inputs: Inputs, name: str, prefill: int = 5) -> str | None:
    whole = _main(model(**inputs, use_cache=False))
    tokens = inputs[name]
    output = model(**{**inputs, name: tokens[:, :prefill]}, use_cache=True)
    parts = [_main(output)]
    for step in range(prefill, tokens.shape[1]):
        arguments = {**inputs, name: tokens[:, step : step + 1], "past_key_values": output["past_key_values"]}
        output = model(**arguments, use_cache=True)
        parts.append(_main(output))
    found = torch.cat(parts, dim=1)
    if found.shape != whole.shape:
        return f"{tuple(found.shape)} for {tuple(whole.shape)}"
    far = _distance(whole, found)
    return f"off by {far:.1e}" if far > TOLERANCE else None


def _main(output: Any) -> torch.Tensor:
    return next(output[name] for name in ("last_hidden_state", "logits") if isinstance(output.get(name), torch.Tensor))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    far = (a - b).abs().max() / max(1.0, float(a.abs().max()))
    return float(far) if bool(far.isfinite()) else float("inf")


def _far(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _distance(a, b) > TOLERANCE


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """The same kind of input with other content."""
    if tensor.is_floating_point():
        return tensor.flip(-1) * 0.7 + 0.1
    low = int(tensor.min())
    return low + (tensor - low + 7) % max(2, int(tensor.max()) - low + 1)


def _randomize(model: nn.Module) -> None:
    """Give the synthesizers weights under which no logits are all but equal."""
    generator = torch.Generator().manual_seed(1)
    for _, module in synthesized(model):
        for name, parameter in module.synthesizer.named_parameters():
            if "dot_product" not in name:
                with torch.no_grad():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


__all__ = ["HOLDS", "LAWS", "Subject", "synthesized", "tensors_of"]
