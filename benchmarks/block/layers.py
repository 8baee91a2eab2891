"""Times one attention block behind each own layer class, synthesized and stock, of BERT-base's width, in one interleaved run.

    python -m benchmarks.block.layers                                  # all layer classes at length 512, as far as they are missing
    python -m benchmarks.block.layers --threads 1 --models llama,bart  # some, on one core
    python -m benchmarks.report.tables                                 # the table in benchmarks/block/results.md

A block is the attention module as the model calls it: with the masks, rotations and biases that the model makes for it, which
is not timed, and with the output projection that BERT has outside of it. Weights are random. Padding is only for what has
it: the images of a ViT have none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from benchmarks.block.blocks import STOCK, fuse, keep
from benchmarks.measurements.grid import FAILURES, Cell, Measured, NotServed, choices, make_quick, parser, reason, walk
from hf_synthesizer import patch_model
from hf_synthesizer.layers.finding.attention_layers import find_attention_layers
from hf_synthesizer.layers.finding.projections import find_projection_names
from hf_synthesizer.measuring.timing import interleaved

WIDTH, HEADS = 768, 12
TINY_WIDTH, TINY_HEADS = 48, 6
VARIANTS = (STOCK, "random", "dense", "random (fused)", "random+salience")
TEXT = {"hidden_size": "width", "num_attention_heads": "heads", "num_hidden_layers": 2, "intermediate_size": 64}
TEXT |= {"vocab_size": 99, "max_position_embeddings": "length", "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": "groups"}
PAIR = {"d_model": "width", "vocab_size": 99, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
PAIR |= {"encoder_attention_heads": "heads", "decoder_attention_heads": "heads", "encoder_ffn_dim": 64}
PAIR |= {"decoder_ffn_dim": 64, "max_position_embeddings": "length"}
T5 = {"d_model": "width", "d_kv": 64, "num_heads": "heads", "d_ff": 64, "num_layers": 2, "vocab_size": 99}


@dataclass(frozen=True)
class Sample:
    """A model of a layer class: its class, the fields of its config, the part that is run, and what that takes."""

    layer_class: str
    model: str
    fields: dict[str, Any] = field(default_factory=lambda: TEXT)
    part: str = ""
    takes: str = "input_ids"


MODELS = {
    "bert": Sample("BertLayer", "BertModel"),
    "distilbert": Sample(
        "PlainLayer",
        "DistilBertModel",
        {"dim": "width", "n_heads": "heads", "n_layers": 2, "hidden_dim": 64, "vocab_size": 99}
        | {"max_position_embeddings": "length"},
    ),
    "vit": Sample(
        "PlainLayer",
        "ViTModel",
        {name: TEXT[name] for name in list(TEXT)[:4]} | {"image_size": "image", "patch_size": 4},
        takes="pixel_values",
    ),
    "albert": Sample("AlbertLayer", "AlbertModel", {**TEXT, "embedding_size": 32}),
    "mpnet": Sample("MPNetLayer", "MPNetModel", {**TEXT, "max_position_embeddings": "more"}),
    "esm": Sample(
        "EsmLayer",
        "EsmModel",
        {**TEXT, "max_position_embeddings": "more", "position_embedding_type": "rotary", "mask_token_id": 4},
    ),
    "bart encoder": Sample("BartLayer", "BartModel", PAIR, part="encoder"),
    "bart decoder": Sample("BartLayer", "BartModel", PAIR, part="decoder"),
    "whisper decoder": Sample(
        "WhisperLayer", "WhisperModel", {**PAIR, "max_target_positions": "length", "num_mel_bins": 8}, part="decoder"
    ),
    "wav2vec2": Sample(
        "SpeechEncoderLayer",
        "Wav2Vec2Model",
        {**{name: TEXT[name] for name in list(TEXT)[:4]}, "num_conv_pos_embedding_groups": 4},
        part="encoder",
        takes="hidden_states",
    ),
    "llama": Sample("RotaryDecoderLayer", "LlamaModel", GROUPED),
    "mistral": Sample("RotaryDecoderLayer", "MistralModel", {**GROUPED, "sliding_window": "window"}),
    "granitemoe": Sample("MaskFirstDecoderLayer", "GraniteMoeModel", {**GROUPED, "num_local_experts": 2}),
    "qwen2_vl text": Sample(
        "PositionedDecoderLayer",
        "Qwen2VLTextModel",
        {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": "sections"}},
    ),
    "stablelm": Sample("StableLmLayer", "StableLmModel", GROUPED),
    "modernbert": Sample("RotaryEncoderLayer", "ModernBertModel", {**TEXT, "global_attn_every_n_layers": 1}),
    "modernbert windows": Sample("RotaryEncoderLayer", "ModernBertModel", {**TEXT, "local_attention": "window"}),
    "nomic_bert": Sample("MaskFirstEncoderLayer", "NomicBertModel"),
    "gpt2": Sample(
        "Gpt2Layer",
        "GPT2Model",
        {"n_embd": "width", "n_head": "heads", "n_layer": 2, "n_inner": 64, "vocab_size": 99, "n_positions": "length"},
    ),
    "opt": Sample(
        "OptLayer",
        "OPTModel",
        {name: value for name, value in TEXT.items() if name != "intermediate_size"}
        | {"ffn_dim": 64, "word_embed_proj_dim": "width"},
    ),
    "gpt_neox": Sample("GptNeoXLayer", "GPTNeoXModel"),
    "t5 encoder": Sample("T5Layer", "T5Model", T5, part="encoder"),
    "t5 decoder": Sample("T5Layer", "T5Model", T5, part="decoder"),
}


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for and not there yet."""
    made = parser(__doc__, "layers.csv", VARIANTS)
    made.set_defaults(lengths=[512], batch_sizes=[8], modes=["inference"], dtypes=["float32"])
    made.add_argument("--models", type=choices(*MODELS), default=None, help="names separated by commas")
    arguments = made.parse_args(argv)
    if arguments.quick:
        make_quick(arguments, [STOCK, "random", "dense"])

    def measure(model: str, cell: Cell, variants: list[str]) -> list[Measured]:
        return measure_cell(model, cell, variants, arguments)

    walk("layers", tuple(arguments.models or MODELS), arguments, measure)


def measure_cell(model: str, cell: Cell, variants: list[str], arguments: Any) -> list[Measured]:
    """All variants of a layer class in one interleaved run, with the stock module among them."""
    sample = MODELS[model]
    torch.manual_seed(0)
    stock = build(sample, cell, arguments.quick)
    runs: dict[str, Callable[[], object]] = {}
    blocks: list[Block] = []
    skipped: dict[str, str] = {}
    for name in dict.fromkeys([STOCK, *variants]):
        try:
            block = called(sample, stock, name, cell)
        except FAILURES as error:
            skipped[name] = reason(error)
            continue
        blocks.append(block)
        runs[name] = block.train_step if cell.train else block.infer
    if STOCK in skipped:
        nothing = interleaved({STOCK: lambda: None}, 1, 0.0)[STOCK]
        return [(name, skipped[STOCK], nothing) for name in variants]

    def forget_gradients() -> None:
        for block in blocks:
            block.forget()

    spreads = interleaved(runs, arguments.repeats, arguments.seconds, before=forget_gradients)
    return [(name, skipped.get(name) or spreads[name], spreads[STOCK]) for name in variants]


def build(sample: Sample, cell: Cell, quick: bool) -> PreTrainedModel:
    """A stock model of two layers with random weights."""
    width, heads = (TINY_WIDTH, TINY_HEADS) if quick else (WIDTH, HEADS)
    part = width // heads // 2
    sizes = {
        "width": width,
        "heads": heads,
        "groups": heads // 3,
        "length": cell.length,
        "more": cell.length + 2,  # what pads has a position too
        "window": max(4, cell.length // 4),
        "image": (4, 4 * (cell.length - 1)),  # and a class token
        "sections": [part - 2 * (part // 3), part // 3, part // 3],
    }

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        return sizes.get(value, value) if isinstance(value, str) else value

    cls = getattr(transformers, sample.model)
    fields = filled(sample.fields)
    if sample.model == "T5Model":
        fields["d_kv"] = width // heads
    config = cls.config_class(**fields)
    config._attn_implementation = "eager" if sample.layer_class == "MPNetLayer" else "sdpa"  # MPNet has no other
    return cls(config).to(cell.torch_dtype).train(cell.train)


class Block(nn.Module):
    """One attention module with all that its model hands it, and the output projection."""

    def __init__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.attention = attention
        named = {**kwargs}
        states = args[0] if args else named.pop("hidden_states")
        self.states = states.detach().clone().requires_grad_(torch.is_grad_enabled())
        self.rest, self.named = args[1:], named
        projection_names = find_projection_names(attention)
        width = self.states.shape[-1]
        outside = projection_names is None or projection_names.output is None
        self.output = nn.Linear(width, width, dtype=self.states.dtype) if outside else nn.Identity()

    def forward(self) -> torch.Tensor:
        return self.output(self.attention(self.states, *self.rest, **self.named)[0])

    def infer(self) -> None:
        with torch.no_grad():
            self()

    def train_step(self) -> None:
        output = self()
        output.backward(torch.ones_like(output))

    def forget(self) -> None:
        self.zero_grad(set_to_none=True)
        self.states.grad = None


def called(sample: Sample, stock: PreTrainedModel, name: str, cell: Cell) -> Block:
    """The last self-attention of a model's part, and what it is called with.

    Raises:
        NotServed: for padding where there can be none, and for what cannot be fused.
    """
    model = copy.deepcopy(stock)
    if name != STOCK:
        layers = {sample.part: True} if sample.model in ("BartModel", "WhisperModel", "T5Model") else None
        patch_model(model, name.removesuffix(" (fused)"), layers=layers, max_length=cell.length)
    part = model.get_submodule(sample.part)
    part.config.use_cache = False  # it would grow from run to run
    prefix = f"{sample.part}." if sample.part else ""
    attention = [
        attention_layer.module
        for attention_layer in find_attention_layers(model)[0]
        if attention_layer.name.startswith(prefix)
    ][-1]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    torch.manual_seed(0)
    with torch.no_grad():
        part(**inputs(sample, model, cell))
    handle.remove()
    block = Block(attention, *calls[-1]).train(cell.train)
    return fuse(block, cell.train) if name.endswith(" (fused)") else block


def inputs(sample: Sample, model: PreTrainedModel, cell: Cell) -> dict[str, Any]:
    """What a part of a model is run on."""
    shape, dtype = (cell.batch_size, cell.length), cell.torch_dtype
    ragged = cell.padding == "ragged"
    width = model.config.hidden_size
    if sample.takes == "pixel_values":
        if ragged:
            raise NotServed("images have no padding")
        sides = model.config.image_size
        return {"pixel_values": torch.randn(cell.batch_size, 3, *sides, dtype=dtype)}
    given: dict[str, Any] = {"input_ids": torch.randint(5, 99, shape)}
    if sample.takes == "hidden_states":
        given = {"hidden_states": torch.randn(*shape, width, dtype=dtype)}
    if sample.part == "decoder":
        given["encoder_hidden_states"] = torch.randn(cell.batch_size, 4, width, dtype=dtype)
    if ragged:
        kept = keep(*shape)
        given["attention_mask"] = kept if sample.takes == "hidden_states" else kept.long()
    return given


if __name__ == "__main__":
    main()
