"""The attention blocks that are compared: self-attention and the output projection, of BERT-base's width.

A block takes hidden states (B, L, 768) and a mask, and gives (B, L, 768). What is left out (residual, LayerNorm) is the
same for all of them.

- `stock sdpa`, `stock eager`: Transformers' own `BertSelfAttention`; `stock sdpa, same library`: its three projections made by the
  library that makes ours (`hf_synthesizer/device/matmul.py`), which is what every headline compares with.
- a variant, such as `dense+salience`: the same module with synthesized logits; `dense (fused)`: after
  `fuse_for_inference`.
- `random [90% of heads]`: so many heads are `random`, rounded up, and the others, evenly spread, go on comparing tokens.
- `floor`: value and output projections and one product of ready-made weights (H, L, L) with the values of the whole
  batch. What has to be done in any case by an attention whose weights are given; masks cost it nothing.
- `dot_product (window 128)`: a query sees the keys less than so many places away, and the first tokens.
- `weights of width one`: each token sees itself alone, so that only the value and output projections are left. The least memory of an
  attention whose weights are given.
- `sparse_strided` and the others that choose their keys: the same again.
- peers: `fnet` (Transformers' Fourier mixing, which has no projections), `nystromformer` (Transformers', 64 landmarks),
  `linformer` (written here, because Transformers has none: keys and values projected along the length to 256).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, FNetConfig, NystromformerConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import hf_synthesizer
from benchmarks.measurements.grid import NotServed
from hf_synthesizer import SynthesizerBertSelfAttention, SynthesizerConfig
from hf_synthesizer.device.matmul import linear, product
from hf_synthesizer.synthesizers.config import layer_config

WIDTH, HEADS = 768, 12
STOCK, SAME_LIBRARY = "stock sdpa", "stock sdpa, same library"
WIDTH_ONE = "weights of width one"
VARIANTS = (
    "random",
    "fixed_random",
    "factorized_random",
    "dense",
    "factorized_dense",
    "random+salience",
    "dense+salience",
    "factorized_dense+salience",
    "random+dot_product",
)
FUSED = tuple(
    f"{name} (fused)"
    for name in ("random", "fixed_random", "factorized_random", "random+salience", "random+dot_product")
)  # dense ones have nothing that is the same for every input
SOME_HEADS = tuple(f"{name} [{share}% of heads]" for name in ("random", "random+salience") for share in (50, 75, 90))
CHOOSING = ("sparse_strided", "sparse_fixed", "lsh_simple", "alsh_simple", "alsh_xbox", "alsh_sign", "routing")
PEERS = ("fnet", "nystromformer", "linformer")
BLOCKS = (STOCK, SAME_LIBRARY, "stock eager", "floor", *VARIANTS, *FUSED, *SOME_HEADS, *CHOOSING, *PEERS)


class Block(nn.Module):
    """Self-attention and output projection."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.output(self.attention(hidden_states, mask)[0])


class OurLinear(nn.Module):
    """A stock projection, made as a patched layer makes its own."""

    def __init__(self, projection: nn.Linear):
        super().__init__()
        self.projection = projection

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return linear(self.projection, hidden_states)


class Floor(nn.Module):
    """Ready-made weights times values: the values of all rows of the batch side by side, one product a head."""

    def __init__(self, length: int):
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("weights", torch.full((HEADS, length, length), 1 / length))

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor]:
        batch, length, _ = hidden_states.shape
        value = linear(self.value, hidden_states).view(batch, length, HEADS, -1)
        columns = value.permute(2, 1, 0, 3).reshape(HEADS, length, -1)  # (H, L, B·d_v)
        if torch.is_grad_enabled():
            mixed = self.weights @ columns
        else:  # the faster one of PyTorch's two libraries
            mixed = torch.stack([product(*pair) for pair in zip(self.weights, columns, strict=True)])
        mixed = mixed.view(HEADS, length, batch, -1)
        return (mixed.permute(2, 1, 0, 3).reshape(batch, length, WIDTH),)


class OwnToken(nn.Module):
    """Weights of width one: each token sees itself alone."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor]:
        return (linear(self.value, hidden_states),)


class FourierMixing(nn.Module):
    """FNet's token mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = FNetBasicFourierTransform(FNetConfig(hidden_size=WIDTH))

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.mixing(hidden_states)[0]


class LinformerSelfAttention(nn.Module):
    """Attention to `rank` mixtures of the keys: softmax(Q (E K)ᵀ / √d_h) (E V), E (rank, L) shared by heads and K, V."""

    def __init__(self, length: int, dropout: float, rank: int = 256):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixture = nn.Parameter(torch.randn(min(rank, length), length) * length**-0.5)
        self.dropout = dropout

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor]:
        batch, length, _ = hidden_states.shape

        def heads(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)

        key, value = self.key(hidden_states), self.value(hidden_states)
        if mask is not None:
            key, value = key * mask, value * mask
        output = functional.scaled_dot_product_attention(
            heads(self.query(hidden_states)),
            heads(self.mixture @ key),
            heads(self.mixture @ value),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return (output.transpose(1, 2).flatten(2),)


def bert_config(length: int, backend: str = "sdpa", dropout: float = 0.0) -> BertConfig:
    return BertConfig(
        max_position_embeddings=length,
        attn_implementation=backend,
        attention_probs_dropout_prob=dropout,
        hidden_dropout_prob=0.0,
    )


def build(name: str, length: int, dtype: torch.dtype, dropout: float = 0.0, train: bool = False) -> nn.Module:
    """A block with random weights; raises `NotServed` with the reason where there is none."""
    if name == "fnet":
        return FourierMixing().to(dtype).train(train)
    if name == "floor":
        attention: nn.Module = Floor(length)
    elif name == WIDTH_ONE:
        attention = OwnToken()
    elif name == "linformer":
        attention = LinformerSelfAttention(length, dropout)
    elif name == "nystromformer":
        config = NystromformerConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            segment_means_seq_len=length,
            attention_probs_dropout_prob=dropout,
        )
        if length % config.num_landmarks:
            raise NotServed(f"the length must be a multiple of {config.num_landmarks}")
        attention = NystromformerSelfAttention(config)
    else:
        backend = "eager" if name == "stock eager" else "sdpa"
        attention = BertSelfAttention(bert_config(length, backend, dropout))
        if name == SAME_LIBRARY:
            for projection in ("query", "key", "value"):
                setattr(attention, projection, OurLinear(getattr(attention, projection)))
        elif not name.startswith("stock "):
            variant, _, share = name.removesuffix(" (fused)").partition(" [")
            variant, _, window = variant.partition(" (window ")
            options = {"window": int(window.removesuffix(")"))} if window else {}
            config = SynthesizerConfig(variant, **options).for_length(length)
            if share:
                config = config.replace(heads=synthesized_heads(int(share.partition("%")[0])))
            attention = SynthesizerBertSelfAttention.from_stock(attention, layer_config(config, HEADS))
    block = Block(attention).to(dtype).train(train)
    return fuse(block, train) if name.endswith(" (fused)") else block


def synthesized_heads(percent: int) -> list[int]:
    """So many heads, rounded up; those that go on comparing are evenly spread, as nobody chooses neighbours."""
    comparing = HEADS - math.ceil(percent * HEADS / 100)
    kept = {round((number + 0.5) * HEADS / comparing - 0.5) for number in range(comparing)}
    return [head for head in range(HEADS) if head not in kept]


def fuse(module: nn.Module, train: bool) -> nn.Module:
    """`fuse_for_inference`, where the library has it."""
    fuse_for_inference: Any = getattr(hf_synthesizer, "fuse_for_inference", None)
    if fuse_for_inference is None:
        raise NotServed("this version of the library has no fuse_for_inference")
    if train:
        raise NotServed("a fused module cannot be trained")
    fuse_for_inference(module)
    return module


def keep(batch_size: int, length: int) -> torch.Tensor:
    """Which tokens of a ragged batch are real, (B, L): row b lacks b/(2B) of them, and the first row the last one."""
    lengths = torch.tensor([length - max(1, length * row // (2 * batch_size)) for row in range(batch_size)])
    return torch.arange(length) < lengths[:, None]


def mask_for(name: str, kept: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The mask that Transformers would make for this block; its own mask function makes it for the stock blocks."""
    if kept is None:
        return None
    if name == "fnet":
        raise NotServed("Fourier mixing takes no mask")
    if name == "linformer":
        return kept[..., None].to(hidden_states.dtype)
    if name == "nystromformer":
        smallest = torch.finfo(hidden_states.dtype).min
        return (~kept)[:, None, None, :].to(hidden_states.dtype) * smallest
    config = bert_config(hidden_states.shape[1], "eager" if name == "stock eager" else "sdpa")
    return create_bidirectional_mask(config=config, inputs_embeds=hidden_states, attention_mask=kept)


def estimated_bytes(name: str, batch_size: int, length: int, dtype: torch.dtype, train: bool) -> int:
    """About how much memory a block will take, weights and all; generous."""
    table = HEADS * length**2 * max(dtype.itemsize, 2)
    needed = 16 * batch_size * length * WIDTH * dtype.itemsize * (2 if train else 1)
    if name == "stock eager":
        needed += batch_size * table * (6 if train else 4)
    if name == "floor" or name.startswith(("random", "fixed_random")):
        needed += table * (4 if train else 2)
    if name.endswith(" (fused)"):
        needed += 2 * table
    return needed
