"""`bench_block`: one attention layer of a model's size on this machine, stock and synthesized in one interleaved run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ..errors import InvalidConfigError, SynthesizerError, UnsupportedModelError
from ..layers.finding.attention_layers import find_attention_layers
from ..patching.swap import patch_model
from .costs import stock_config
from .timing import Spread, interleaved

STOCK = "stock"
VARIANTS = ("random", "factorized_random", "dense", "factorized_dense", "dense+salience", "random+dot_product")
VOCABULARY = 256
"""Of the model that is built for one layer: its words play no part."""


@dataclass(frozen=True)
class BlockTime:
    """One attention at one length: milliseconds, how many times as fast as stock in the same run, or why there is none."""

    attention: str
    length: int
    milliseconds: float | None
    speedup: float | None
    refused: str = ""


@dataclass(frozen=True)
class BlockReport:
    """What one layer takes. Prints as a table. A busy machine makes all of them slower, but in the same rounds."""

    times: tuple[BlockTime, ...]
    model_type: str
    batch_size: int
    device: str
    dtype: str
    threads: int
    training: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'attention':24}{'length':>8}{'ms':>12}{'to stock':>12}"]
        lines.append("-" * len(lines[0]))
        for time in self.times:
            if time.milliseconds is None:
                lines.append(f"{time.attention:24}{time.length:>8}  {time.refused}")
            else:
                lines.append(
                    f"{time.attention:24}{time.length:>8}{time.milliseconds:>12.2f}{time.speedup:>11.2f}×".rstrip()
                )
        what = "a step of training" if self.training else "inference"
        lines.append(
            f"one layer of {self.model_type}, {what}, batch {self.batch_size}, {self.device}, {self.dtype}, "
            f"{self.threads} thread{'s' * (self.threads > 1)}"
        )
        return "\n".join(lines)


def bench_block(
    config: PreTrainedConfig,
    variants: Iterable[str] = VARIANTS,
    lengths: Iterable[int] = (128, 512),
    *,
    batch_size: int = 8,
    seconds: float = 40.0,
    training: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> BlockReport:
    """Time one self-attention block, all its projections included, of the size that a config describes.

    Weights are random, and there is no padding.

    Args:
        config: of a stock or a patched model that reads tokens.
        variants: what to compare with stock attention under `sdpa`.
        lengths: in tokens.
        batch_size: rows.
        seconds: for everything; there are three rounds at least.
        training: a forward and a backward, instead of a forward.
        device: where.
        dtype: in which precision.

    Raises:
        UnsupportedModelError: for a model that has no such layer.
        InvalidConfigError: for a number that is not positive.
    """
    names, chosen = list(dict.fromkeys(variants)), list(lengths)
    if batch_size < 1 or seconds <= 0 or not chosen or min(chosen) < 1:
        raise InvalidConfigError("The batch size, the seconds and every length must be positive.")
    built: Any = _one_layer(config, max(chosen))
    model: PreTrainedModel = built.to(device, dtype).train(training)
    times: list[BlockTime] = []
    for length in chosen:
        times += _times(model, names, length, batch_size, seconds / len(chosen), training)
    return BlockReport(
        tuple(times),
        model.config.model_type,
        batch_size,
        str(device),
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        training,
    )


def _one_layer(config: PreTrainedConfig, length: int) -> PreTrainedModel:
    """A stock model with the first layer alone, and few words."""
    small = copy.deepcopy(stock_config(config).get_text_config())
    for name in (
        "num_hidden_layers",
        "num_layers",
        "num_decoder_layers",
        "n_layer",
        "encoder_layers",
        "decoder_layers",
    ):
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, 1)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    small.vocab_size = min(small.vocab_size, VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), small.vocab_size - 1))
    if getattr(small, "max_position_embeddings", None):
        small.max_position_embeddings = max(
            small.max_position_embeddings, length + 8
        )  # some count from behind padding
    small.use_cache = False
    return AutoModel.from_config(small, attn_implementation="sdpa")


def _times(
    model: PreTrainedModel, variants: list[str], length: int, batch_size: int, seconds: float, training: bool
) -> list[BlockTime]:
    attention_layers, _ = find_attention_layers(model)
    if not attention_layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no self-attention that could be synthesized.")
    attention_layer = attention_layers[0]
    block = attention_layer.name.removesuffix(".self")  # models after BERT keep the output projection one level higher
    args, kwargs = _call_of(model, model.get_submodule(block), length, batch_size)
    layers: dict[str, nn.Module] = {STOCK: model.get_submodule(block)}
    refused: dict[str, str] = {}
    for variant in variants:
        try:
            patched = patch_model(copy.deepcopy(model), {attention_layer.label: variant}, max_length=length)
        except SynthesizerError as error:
            refused[variant] = str(error)
            continue
        layers[variant] = patched.get_submodule(block)
    runs = {name: _run(layer, args, kwargs, training) for name, layer in layers.items()}
    spreads: dict[str, Spread] = interleaved(runs, 1000, seconds)
    stock = spreads[STOCK].median
    return [
        BlockTime(name, length, None, None, refused[name])
        if name in refused
        else BlockTime(name, length, round(spreads[name].median, 4), round(stock / spreads[name].median, 3))
        for name in (STOCK, *variants)
    ]


def _call_of(model: PreTrainedModel, layer: nn.Module, length: int, batch_size: int) -> tuple[Any, Any]:
    """What the model hands to the layer."""
    calls: list[tuple[Any, Any]] = []
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    words = model.config.vocab_size
    tokens = torch.randint(words // 2, words - 1, (batch_size, length), device=model.device)  # none is padding
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens[:, :1]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    return calls[0]


def _run(layer: nn.Module, args: Any, kwargs: Any, training: bool) -> Callable[[], object]:
    def infer() -> None:
        with torch.no_grad():
            layer(*args, **kwargs)

    def train() -> None:
        layer.zero_grad(set_to_none=True)
        output = layer(*args, **kwargs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()

    return train if training else infer
