"""What all families share: a stock attention module whose logits are synthesized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from transformers.cache_utils import QuantizedLayer

from ..attend import attend
from ..checkpoints.guard import Guard
from ..config import SynthesizerConfig
from ..errors import CheckpointMismatchError, UnsupportedModelError
from ..masks import AttentionMask
from ..positions import Positions, exporting
from ..synthesizers import Synthesizer, build_synthesizer

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

BACKENDS = ("eager", "sdpa")


class SynthesizerMixin(nn.Module):
    """Mixed into a stock attention class: `class SynthesizerXxx(SynthesizerMixin, Xxx)`.

    The stock module keeps its values, its output and its place in the model; its query and key projections go,
    `synthesizer` makes the logits, and a `Guard` stands where the query projection was. A family says what its projections are called, what its dimensions are, how long
    its sequences are, and how its forward signature reads.
    """

    projections: ClassVar[tuple[str, str]]
    """The names of the stock module's query and key projections."""
    value_projection: ClassVar[str]
    """The name of its value projection."""
    config: Any
    layer_idx: Any
    is_causal: bool
    scaling: float
    synthesizer: Synthesizer

    def __init__(self, *args: Any, synthesizer: str | SynthesizerConfig, **kwargs: Any):
        """As the stock class, with fresh weights, and a variant or a configuration of the logits."""
        super().__init__(*args, **kwargs)
        config = SynthesizerConfig(synthesizer) if isinstance(synthesizer, str) else synthesizer
        if config.max_length is None:
            config = config.replace(max_length=self.default_max_length(self.config))
        self.replace_projections(config)

    @staticmethod
    def default_max_length(config: Any) -> int:
        """The model's own maximum length, from its config."""
        raise TypeError("a family must define `default_max_length`")

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """hidden_size, num_heads and head_dim of the stock module."""
        raise TypeError(f"{type(self).__name__} must define `dimensions`")

    @property
    def dropout_probability(self) -> float:
        """With which probability the stock module drops a weight in training."""
        raise TypeError(f"{type(self).__name__} must define `dropout_probability`")

    @classmethod
    def from_stock(cls, stock: nn.Module, config: SynthesizerConfig) -> SynthesizerMixin:
        """A synthesized twin of a stock module, which is left as it was.

        The twin shares everything with it (values, dropout, hooks, train or eval mode) but the two projections.
        """
        twin = cls.__new__(cls)
        twin.__dict__.update(stock.__dict__)
        for registry in ("_modules", "_parameters", "_buffers"):
            twin.__dict__[registry] = dict(stock.__dict__[registry])
        twin.replace_projections(config)
        return twin

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state dict that has this layer's values must have its synthesizer, even where missing keys are allowed.

        Trainer loads its checkpoints so; a stock one would leave the synthesizer as it was, with no more than a
        warning.
        """
        own = [prefix + name for name in self.state_dict() if name.startswith("synthesizer.")]
        missing = [name for name in own if name not in state_dict]
        if missing and f"{prefix}{self.value_projection}.weight" in state_dict:
            raise CheckpointMismatchError(
                f"The state dict has the values of the synthesized layer {prefix.removesuffix('.')!r} but not its "
                f"tensor {missing[0]!r}, so it belongs to a stock model or to another variant. Load the checkpoint of a "
                f"model that was patched in the same way, or load it into the stock model and patch that."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def stock_logit_parameters(self) -> int:
        """How many parameters the two projections had."""
        hidden_size, num_heads, head_dim = self.dimensions
        value = getattr(self, self.value_projection)
        return 2 * num_heads * head_dim * (hidden_size + (value.bias is not None))

    def replace_projections(self, config: SynthesizerConfig) -> None:
        """Put a synthesizer where the query and key projections were, on their device and with their dtype."""
        query, key = (cast(nn.Linear, self._modules.pop(name)) for name in self.projections)
        hidden_size, num_heads, head_dim = self.dimensions
        weight = query.weight
        with torch.device(weight.device):
            synthesizer = build_synthesizer(config, hidden_size, num_heads, config.max_length or 0, head_dim=head_dim)
        synthesizer.to(weight.dtype)
        synthesizer.set_causal(self.is_causal)
        synthesizer.load_stock(query=query, key=key, scaling=self.scaling)
        synthesizer.train(self.training)
        self.synthesizer = synthesizer
        self.register_module(self.projections[0], Guard(config, weight.device).train(self.training))

    def require_backend(self, mask: Any) -> None:
        """Raise `UnsupportedModelError` for an attention backend whose masks this layer cannot read."""
        backend = self.config._attn_implementation
        if backend not in BACKENDS or not (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 4)):
            found = f"a mask of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedModelError(
                f"Synthesized attention runs under the backends {' and '.join(BACKENDS)}; this model asks for "
                f"{backend!r} and passes {found} as mask. Call model.set_attn_implementation('sdpa'), or load the "
                f"model with attn_implementation='sdpa'."
            )

    def synthesize(
        self,
        hidden_states: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        positions: Positions,
        key_states: torch.Tensor | None,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, mask, softmax and values: output (B, Lq, H·d_v), and weights (B, H, Lq, Lk) under eager.

        Args:
            hidden_states: (B, Lq, d).
            value: (B, H, Lk, d_v), cached ones included.
            mask: as Transformers' eager and sdpa backends pass it.
            positions: of queries and keys.
            key_states: what the logits need to know of the keys' tokens, cached ones included.
            position_bias: (1 or B, H, Lq, Lk), added to the logits.
        """
        guard = self._modules[self.projections[0]]
        if isinstance(guard, Guard):  # PEFT may have wrapped it
            guard.require(f"layer {self.layer_idx} of this model")
        # Under sdpa Transformers passes no mask where a plain triangle would do: the module itself has to be causal.
        one_step = positions.query_length == 1 and not isinstance(positions.start, torch.Tensor)
        causal = self.is_causal and mask is None and not one_step
        attention_mask = AttentionMask.from_tensor(mask, causal_offset=positions.start if causal else None)
        logits = self.synthesizer(hidden_states, key_states, positions)
        output, weights = attend(
            logits,
            value,
            attention_mask.with_bias(position_bias),
            dropout=self.dropout_probability if self.training else 0.0,
            need_weights=self.config._attn_implementation == "eager",
        )
        output = output.transpose(1, 2)  # (B, Lq, H, d_v)
        if exporting():
            # How a kernel lays out its output here is no promise for the one that runs there.
            output = output.clone(memory_format=torch.contiguous_format)
        return output.flatten(2), weights

    def update_cache(
        self, hidden_states: torch.Tensor, value: torch.Tensor, past_key_values: Cache | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, int | torch.Tensor]:
        """Add the new tokens to the cache: key states and values of all tokens, and how many were there before.

        Pure synthesizers look at no other token, so that only values have to be kept; a key of width 1 stands in,
        because Transformers reads a cache's length off its keys. A quantized cache works on groups of numbers, which one
        a key would not fill: there keys are as wide as values.
        """
        key_states = self.synthesizer.project_keys(hidden_states)
        if past_key_values is None:
            return key_states, value, 0
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        past_length = cache.get_seq_length(self.layer_idx)
        if isinstance(past_length, torch.Tensor):
            past_length = past_length.clone()  # a static cache counts on in place
        stored = value.new_zeros(*value.shape[:-1], 1) if key_states is None else key_states
        width = stored.shape[-1]
        layers = getattr(cache, "layers", ())
        if self.layer_idx < len(layers) and isinstance(layers[self.layer_idx], QuantizedLayer):
            stored = nn.functional.pad(stored, (0, max(0, value.shape[-1] - width)))
        stored, value = cache.update(stored, value, self.layer_idx)
        return None if key_states is None else stored[..., :width], value, past_length
