"""`bench_block`: the time of one attention layer of a model's size on this machine, stock and synthesized."""

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
from .timing import interleaved

STOCK = "stock"
VARIANTS = ("random", "factorized_random", "dense", "factorized_dense", "dense+salience", "random+dot_product")
VOCABULARY = 256
"""The size of the vocabulary of the model around the layer. It does not change the time of the layer."""
DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers", "decoder_layers")
"""Fields of configs with a number of layers."""


@dataclass(frozen=True)
class BlockTime:
    """The time of one attention at one length, and its speed as a multiple of stock; or why the variant is refused."""

    attention: str
    length: int
    milliseconds: float | None
    speedup: float | None
    refused: str = ""


@dataclass(frozen=True)
class BlockReport:
    """The times of one layer. Prints as a table. All were measured in the same rounds, so a busy machine slows all alike."""

    times: tuple[BlockTime, ...]
    model_type: str
    batch_size: int
    device: str
    dtype: str
    threads: int
    training: bool

    def to_dict(self) -> dict[str, Any]:
        """A dict that `json.dumps` accepts."""
        return asdict(self)

    def __str__(self) -> str:
        header = f"{'attention':24}{'length':>8}{'ms':>12}{'to stock':>12}"
        lines = [header, "-" * len(header)]
        for time in self.times:
            measured = f"{time.milliseconds:>12.2f}{time.speedup:>11.2f}×" if time.milliseconds is not None else ""
            lines.append(f"{time.attention:24}{time.length:>8}{measured or '  ' + time.refused}")
        lines.append(
            f"one layer of {self.model_type}, {'a step of training' if self.training else 'inference'}, batch "
            f"{self.batch_size}, {self.device}, {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}"
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
    """Time one self-attention block with all its projections, of the size in a config. Weights are random; no padding.

    Args:
        config: the config of a stock or a patched model that reads tokens.
        variants: the variants to compare with stock attention under `sdpa`.
        lengths: lengths in tokens.
        batch_size: the number of rows.
        seconds: the time for all measurements. There are at least three rounds.
        training: whether to time a forward and a backward pass, instead of a forward pass.
        device: the device of weights and inputs.
        dtype: the dtype of weights and inputs.

    Raises:
        UnsupportedModelError: for a model that has no such layer.
        InvalidConfigError: for a number that is not positive.
    """
    variants, lengths = list(dict.fromkeys(variants)), list(lengths)
    if batch_size < 1 or seconds <= 0 or not lengths or min(lengths) < 1:
        raise InvalidConfigError("The batch size, the seconds and every length must be positive.")
    built: Any = _one_layer(config, max(lengths))
    model: PreTrainedModel = built.to(device, dtype).train(training)
    share = seconds / len(lengths)
    times = [time for length in lengths for time in _times(model, variants, length, batch_size, share, training)]
    precision, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
    return BlockReport(tuple(times), model.config.model_type, batch_size, str(device), precision, threads, training)


def _one_layer(config: PreTrainedConfig, length: int) -> PreTrainedModel:
    """A stock model with the first layer alone, and a small vocabulary."""
    small: Any = copy.deepcopy(stock_config(config).get_text_config())
    small.vocab_size = min(small.vocab_size, VOCABULARY)
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), small.vocab_size - 1)
    for name, most in {**dict.fromkeys(DEPTHS, 1), **tokens}.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), most))
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    if getattr(small, "max_position_embeddings", None):  # some models count positions from behind padding
        small.max_position_embeddings = max(small.max_position_embeddings, length + 8)
    small.use_cache = False
    return AutoModel.from_config(small, attn_implementation="sdpa")


def _times(
    model: PreTrainedModel, variants: list[str], length: int, batch_size: int, seconds: float, training: bool
) -> list[BlockTime]:
    attention_layers, _ = find_attention_layers(model)
    if not attention_layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no self-attention that could be synthesized.")
    block = attention_layers[0].name.removesuffix(".self")  # BERT has the output projection one level higher
    args, kwargs = _inputs_of(model, model.get_submodule(block), length, batch_size)
    layers: dict[str, nn.Module] = {STOCK: model.get_submodule(block)}
    refused: dict[str, str] = {}
    for variant in variants:
        try:
            patched = patch_model(copy.deepcopy(model), {attention_layers[0].label: variant}, max_length=length)
            layers[variant] = patched.get_submodule(block)
        except SynthesizerError as error:
            refused[variant] = str(error)
    runs = {name: _run(layer, args, kwargs, training) for name, layer in layers.items()}
    medians = {name: spread.median for name, spread in interleaved(runs, 1000, seconds).items()}
    return [
        BlockTime(name, length, None, None, refused[name])
        if name in refused
        else BlockTime(name, length, round(medians[name], 4), round(medians[STOCK] / medians[name], 3))
        for name in (STOCK, *variants)
    ]


def _inputs_of(model: PreTrainedModel, layer: nn.Module, length: int, batch_size: int) -> tuple[Any, Any]:
    """The arguments with which a model calls a layer."""
    calls: list[tuple[Any, Any]] = []
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    vocabulary = model.config.vocab_size
    # No token is padding, whose id is 0 or the last.
    tokens = torch.randint(vocabulary // 2, vocabulary - 1, (batch_size, length), device=model.device)
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
