"""What every synthesizer is: a module from hidden states to lazy logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..logits.forms import Logits
from ..logits.positions import Positions
from .config import SynthesizerConfig

LOADED = "_is_hf_initialized"
"""How Transformers marks a tensor that came from a checkpoint, and a module that is initialised."""


class Synthesizer(nn.Module):
    """The logits S of `softmax(S + mask) · V`, for H heads of width d_h and up to N = `max_length` positions.

    A subclass is registered with `@register_variant("name")`, and defines `__init__` with the signature below,
    `synthesize`, `start_at_zero` and, when it looks at the keys' tokens, `key_width` and `project_keys`.

    Hooks on modules (offloading, sharding) bring parameters when a module is called, and take them away again. So a synthesizer
    that holds others calls them, and `project_keys`, which runs outside of `forward`, reads parameters of submodules that it calls.

    Args:
        hidden_size: the width d of the hidden states.
        num_heads: the number H of heads.
        max_length: the number N of positions.
        config: the options; the registered variant's defaults if None.
        head_dim: the width d_h of a head, `hidden_size // num_heads` if None.
    """

    variant: ClassVar[str]
    """The registered name."""
    formula: ClassVar[str]
    """The logits S[h, i, j], as the README prints them."""
    parameter_formula: ClassVar[str]
    """How many weights the logits of a layer train, biases left out."""
    options: ClassVar[frozenset[str]] = frozenset()
    """The fields of `SynthesizerConfig`, and own options, that the variant uses."""
    is_static: ClassVar[bool] = False
    """Whether S does not depend on the input."""
    key_side: ClassVar[bool] = False
    """Whether S says what a key is worth to everybody; such a part joins a mixture with weight 1."""
    chooses_keys: ClassVar[bool] = False
    """Whether a query attends to some keys alone; such logits cannot be added to others in a mixture."""
    whole_sequence: ClassVar[bool] = False
    """Whether the logits of a query depend on tokens behind it, so that no decoder can have them."""
    is_stock: ClassVar[bool] = False
    """Whether S is what the stock layer computes, as it was pretrained."""
    stock_projections: ClassVar[tuple[str, str] | None] = None
    """The modules that begin as the stock layer's query and key projection."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        config: SynthesizerConfig | None = None,
        *,
        head_dim: int | None = None,
    ):
        super().__init__()
        self.config = config if config is not None else SynthesizerConfig(self.variant)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.max_length = max_length
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim

    @property
    def table_heads(self) -> int:
        """How many heads the tables have: 1 when all heads share them."""
        return 1 if self.config.share_heads else self.num_heads

    @property
    def key_width(self) -> int:
        """How many numbers a head the logits need to know of each key's token; a decoder's cache keeps them."""
        return 0

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """What the logits need to know of the keys' tokens: (B, H, L, key_width), or None if that is nothing."""
        return None

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        """The logits of the queries at `hidden_states` (B, Lq, d)."""
        raise TypeError(f"{type(self).__name__} must define synthesize()")

    def static_table(self) -> torch.Tensor | None:
        """The logits (H, N, N), as far as they do not depend on the input; None if all of them do."""
        return None

    def input_terms(
        self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions
    ) -> list[tuple[torch.Tensor | None, Logits]]:
        """The logits without `static_table`, as weighted terms."""
        return []

    def start_at_zero(self) -> None:
        """Make all logits exactly 0, but leave them a gradient (for `mixing="sum"`)."""
        raise TypeError(f"{type(self).__name__} must define start_at_zero()")

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_states: torch.Tensor | None = None,
        positions: Positions | None = None,
    ) -> Logits:
        """The logits for `hidden_states` (B, Lq, d); without the rest, those of a plain sequence of Lq tokens.

        Raises:
            SequenceTooLongError: for more than `max_length` positions.
        """
        if positions is None:
            positions = Positions(hidden_states.shape[-2], hidden_states.shape[-2])
        if key_states is None:
            key_states = self.project_keys(hidden_states)
        positions = positions.within(self.max_length, hidden_states.device)
        return self.synthesize(hidden_states, key_states, positions)

    def split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """(B, L, H·x) → (B, H, L, x)."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, self.num_heads, -1).transpose(1, 2)

    def copied_parameters(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Weights that `named_parameters` does not list: of each its name, the tensor, and whether it is trained."""
        return iter(())

    def extra_repr(self) -> str:
        shown = {"num_heads": self.num_heads, "max_length": self.max_length, **self.config.non_default()}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def load_stock(self, query: nn.Module, key: nn.Module, scaling: float) -> None:
        """Take over what the stock layer's attention logits were made of, as far as the variant has a use for it."""

    def stock_parts(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """What began as stock query and key projections, here and in parts."""
        for module in self.modules():
            if isinstance(module, Synthesizer) and module.stock_projections is not None:
                query, key = module.stock_projections
                yield module.get_submodule(query), module.get_submodule(key)

    def reset_parameters(self) -> None:
        """Give every tensor the value that it has in a new synthesizer, as `nn.Linear.reset_parameters` does: for a model that was
        made without memory (`torch.device("meta")`, `to_empty`).

        Two kinds of tensors stay as they are: those that Transformers has loaded, and the stock projections, which Transformers
        initialises as it does in a stock model.
        """
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        kept = {id(tensor) for pair in self.stock_parts() for module in pair for tensor in module.parameters()}
        wanted = {
            name: tensor
            for name, tensor in tensors.items()
            if id(tensor) not in kept and not getattr(tensor, LOADED, False)
        }
        if wanted:
            device = next(iter(wanted.values())).device
            with torch.device(device), torch.no_grad():
                fresh = self.new()
                values = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
                for name, tensor in wanted.items():
                    tensor.copy_(values[name])

    def new(self) -> Synthesizer:
        """Another synthesizer with the same arguments."""
        return type(self)(self.hidden_size, self.num_heads, self.max_length, self.config, head_dim=self.head_dim)

    def set_causal(self, causal: bool) -> None:
        """Be told whether the layer is a decoder's.

        Raises:
            UnsupportedModelError: when it is, and the logits depend on the `whole_sequence`.
        """
        if causal and self.whole_sequence:
            raise UnsupportedModelError(
                f"The variant {self.variant!r} chooses its keys over the whole sequence, so that a decoder's query would "
                f"know of tokens behind it. Patch an encoder with it (T5: layers={{'encoder': True}}), and give a "
                f"decoder sparse_strided, sparse_fixed, or a variant that chooses no keys."
            )
