"""Tries with numbers whether the forward of a layer class equals the stock forward, apart from the logits.

The names in a stock forward do not say what it does with them: a norm that is known for keys may be applied to values.
So a copy of the layer with random weights gets queries of zero: all its logits are 0. Our forward gets a table of zeros. If
the outputs differ, values, mask or output projection differ.

The copy has the sizes of the layer, but hardly any memory: its weights are overlapping views of short random vectors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...device.autocast import without_autocast
from ...synthesizers.config import SynthesizerConfig
from ...synthesizers.stock_weights import is_quantized
from ...upstream.torch_names import ACCELERATE_FORWARD, ACCELERATE_HOOK
from .projections import ProjectionNames, find_projection_names, head_dim, in_features, out_features

if TYPE_CHECKING:
    from ..mixin import SynthesizerMixin

LENGTH, ROWS = 3, 2
TOLERANCE = 1e-3
"""Relative to the largest number of an output. A gate or a norm changes it by far more."""
OVERRIDES = ("forward", ACCELERATE_FORWARD, ACCELERATE_HOOK)
"""Attributes that offloading sets on a module, in place of its class's forward."""

_EQUAL: dict[tuple[Any, ...], bool | None] = {}


def equals_stock(cls: type[SynthesizerMixin], layer: nn.Module) -> bool | None:
    """Whether `cls` and the stock forward of this layer compute the same if all logits are 0.

    None if the stock forward takes none of the inputs that we try. `layer` has all modules of the stock class. Its weights are
    not read, so they may be on the meta device. The answer is cached for layers of the same class with the same switches.
    """
    key = (cls, cls.stock_class.forward, *_switches(layer))
    if key not in _EQUAL:
        _EQUAL[key] = _compare(cls, layer)
    return _EQUAL[key]


def _switches(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a layer on which a stock forward may branch, or by which it may scale: all but sizes."""
    for name, value in sorted(layer.__dict__.items()):
        if isinstance(value, (bool, str, float)) and name != "training":
            yield name, value


def _compare(cls: type[SynthesizerMixin], layer: nn.Module) -> bool | None:
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cpu, without_autocast(cpu):
        stock = Copies().of(layer)
        stock.__class__ = cls.stock_class
        projection_names = find_projection_names(stock)
        if projection_names is None:
            return None  # it says so itself when it is built
        _attend_evenly(stock, projection_names)
        ours = cls.from_stock_unchecked(stock, SynthesizerConfig("random", max_length=LENGTH))
        for parameter in ours.synthesizer.parameters():
            nn.init.zeros_(parameter)
        for inputs in _inputs(stock):
            try:
                expected = _output(stock(**inputs))
            except Exception:  # noqa: BLE001 - not the inputs of this forward; the next may be
                continue
            try:
                output = _output(ours(**inputs))
            except Exception:  # noqa: BLE001 - then it is not equal
                return False
            if output.shape != expected.shape:
                return False
            return bool((output - expected).abs().max() <= TOLERANCE * expected.abs().max())
    return None


class Copies:
    """Copies of a module and of all modules in it, on the processor, in float32, with random parameters."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(0)

    def of(self, module: nn.Module) -> nn.Module:
        """A copy without hooks, in eval mode, that asks for eager attention."""
        if is_projection(module) and is_quantized(module):
            copied: Any = nn.Linear(in_features(module), out_features(module), device="meta")
            copied.weight, copied.bias = self.random(copied.weight), self.random(copied.bias)
            return cast(nn.Module, copied.eval())
        copied = type(module).__new__(type(module))
        nn.Module.__init__(copied)
        fresh = copied.__dict__.keys()
        for name, value in module.__dict__.items():
            if name not in fresh and name not in OVERRIDES:
                copied.__dict__[name] = value
        config = module.__dict__.get("config")
        if config is not None:
            copied.__dict__["config"] = config = copy.deepcopy(config)
            config._attn_implementation = "eager"  # in its sub-configs too
        for name, parameter in module._parameters.items():
            copied._parameters[name] = None if parameter is None else self.random(parameter)
        for name, buffer in module._buffers.items():
            copied._buffers[name] = self.buffer(buffer)
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self.of(child)
        return copied.eval()

    def random(self, like: torch.Tensor) -> nn.Parameter:
        """Random numbers of this shape: (out, in) takes the memory of out + in."""
        numbers = torch.randn(sum(like.shape) + 1, generator=self.generator, device="cpu", dtype=torch.float32)
        if like.dim() > 1:
            numbers = (numbers / max(like.shape) ** 0.5).as_strided(like.shape, (1,) * like.dim())
        return nn.Parameter(numbers if like.dim() > 1 else numbers[: like.numel()].view(like.shape), False)

    def buffer(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if buffer is None or not buffer.is_meta:
            return buffer if buffer is None else buffer.cpu()
        if buffer.is_floating_point():
            return self.random(buffer).data
        return torch.ones(buffer.shape, dtype=buffer.dtype, device="cpu")


def is_projection(module: nn.Module) -> bool:
    """Whether a module names the widths of its input and output, as `nn.Linear` and quantized ones do."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _attend_evenly(stock: nn.Module, projection_names: ProjectionNames) -> None:
    """Let a stock layer project queries of zero."""
    projection = cast(nn.Module, stock._modules[projection_names.fused or projection_names.query])
    weight, rows = cast(torch.Tensor, projection.weight), slice(None)
    if projection_names.rows is None:
        weight = torch.zeros((), device="cpu").expand(weight.shape)
    else:
        rows = projection_names.rows(stock, out_features(projection))["query"]  # type: ignore[assignment]
        weight = weight.contiguous()
        (weight if hasattr(projection, "out_features") else weight.t())[rows] = 0
    projection.weight = nn.Parameter(weight, False)
    for module in (
        projection,
        *(norm for name, norm in stock._modules.items() if norm is not None and "norm" in name),
    ):
        bias = getattr(module, "bias", None)
        if isinstance(bias, torch.Tensor):
            bias[rows if module is projection else slice(None)] = 0  # a norm of zero is its bias


def _inputs(stock: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments that a forward may take: hidden states, a triangle as mask, and rotations in one of the shapes of models."""
    parameters = inspect.signature(stock.forward).parameters
    generator = torch.Generator("cpu").manual_seed(1)
    projection_names = cast(ProjectionNames, find_projection_names(stock))
    width = in_features(cast(nn.Module, stock._modules[projection_names.fused or projection_names.value]))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    triangle = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min, device="cpu").triu(1)
    inputs: dict[str, Any] = {next(iter(parameters)): noise(ROWS, LENGTH, width)}
    for name in ("attention_mask", "mask"):
        if name in parameters:
            inputs[name] = triangle.expand(ROWS, 1, -1, -1)
    if "position_ids" in parameters:
        inputs["position_ids"] = torch.arange(LENGTH, device="cpu").expand(ROWS, -1)
    if "position_embeddings" in parameters:
        partial = getattr(stock, "rotary_ndims", head_dim(stock))
        for size in dict.fromkeys((head_dim(stock), int(partial), head_dim(stock) // 2)):
            for before in ((1, LENGTH), (LENGTH,), (3, ROWS, LENGTH)):
                yield {**inputs, "position_embeddings": (noise(*before, size), noise(*before, size))}
        yield {**inputs, "position_embeddings": noise(ROWS, LENGTH, width)}
    yield inputs


def _output(output: Any) -> torch.Tensor:
    return cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)
