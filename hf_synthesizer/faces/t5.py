"""T5: encoder-decoder, encoder alone, and every head of Transformers."""

from __future__ import annotations

from transformers import T5Config
from transformers.models.t5 import modeling_t5
from transformers.models.t5.modeling_t5 import T5Attention

from ..checkpoints.model_mixin import stock_models, synthesizer_models
from ..errors import UnsupportedModelError
from ..gemm import linear
from ..positions import Positions
from .mixin import SynthesizerMixin
from .registry import Family, register_family


class SynthesizerT5Attention(SynthesizerMixin, T5Attention):
    """`T5Attention` as self-attention, with synthesized logits. The relative position bias stays, added to them."""

    projections = ("q", "k")
    value_projection = "v"

    @staticmethod
    def default_max_length(config: T5Config) -> int:
        # T5 has no longest sequence of its own; its checkpoints were trained at 512, and most configs say so.
        return getattr(config, "n_positions", 512)

    @property
    def dimensions(self) -> tuple[int, int, int]:
        return self.d_model, self.n_heads, self.key_value_proj_dim

    @property
    def dropout_probability(self) -> float:
        return self.dropout

    def forward(
        self,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        past_key_values=None,
        **kwargs,
    ):
        if key_value_states is not None:
            raise UnsupportedModelError(
                "A synthesizer replaces self-attention only, but key_value_states were given, which means "
                "cross-attention. Leave the cross-attention layer as it is."
            )
        self.require_backend(mask)
        batch, length, _ = hidden_states.shape
        value = linear(self.v, hidden_states).view(batch, length, -1, self.key_value_proj_dim).transpose(1, 2)
        key_states, value, past_length = self.update_cache(hidden_states, value, past_key_values)
        key_length = value.shape[-2]
        # T5 knows positions relative to each other only, so that padding on the left changes nothing: nor must it here.
        positions = Positions.from_left_padding(mask, length, key_length, past_length)
        if position_bias is None:
            # Layers share the bias: the first one owns it and hands it on, whether or not it is patched.
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias(
                    length, key_length, device=value.device, past_seen_tokens=past_length
                )
            else:
                position_bias = value.new_zeros(1, self.n_heads, length, key_length)
        output, weights = self.synthesize(hidden_states, value, mask, positions, key_states, position_bias)
        return linear(self.o, output), position_bias, weights


class SynthesizerT5Config(T5Config):
    """`T5Config`, and which layers are synthesized and how."""

    model_type = "synthesizer_t5"

    synthesizer: dict | None = None


def _stack_of(name: str, module: T5Attention) -> str | None:
    if name.rpartition(".")[2] == "EncDecAttention":
        return None
    return "decoder" if module.is_decoder else "encoder"


T5 = register_family(
    Family(
        name="t5",
        stock_attention=T5Attention,
        attention=SynthesizerT5Attention,
        config_class=SynthesizerT5Config,
        models=synthesizer_models(
            __name__, stock_models(modeling_t5, modeling_t5.T5PreTrainedModel), SynthesizerT5Config
        ),
        stack_of=_stack_of,
        inner_models=(modeling_t5.T5Stack,),
    )
)
