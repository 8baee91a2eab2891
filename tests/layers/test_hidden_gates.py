"""Stock attention layers that do more than ours in ways that names alone do not show: they keep their own forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from hf_synthesizer import UnsupportedModelError, patch_model
from hf_synthesizer.layers import find_layer_class
from hf_synthesizer.layers.finding.even_attention import Copies, equals_stock
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.layers.signatures.rotary import RotaryDecoderLayer
from hf_synthesizer.layers.stock_forward import StockForwardLayer
from tests.helpers.layers import GROUPED
from tests.helpers.models import batch, build, first_output

FORWARD = """
def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    {values}
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
    output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
    {output}
    return output, weights
"""
NESTED = """def gated(states):
        return states * self.gate(hidden_states)
    output = gated(output)"""


def written(values: str = "", output: str = "", names: dict[str, str] | None = None) -> Callable[..., Any]:
    """Llama's forward with a line on its values and one on its output, and with other names of its projections."""
    source = FORWARD.format(values=values, output=output)
    for stock, name in (names or {}).items():
        source = source.replace(stock, name)
    variables = dict(vars(modeling_llama))
    exec(source, variables)
    return variables["forward"]


def gated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that looks like what it wraps, with a gate."""

    @functools.wraps(forward)
    def around(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = forward(self, hidden_states, *args, **kwargs)
        return output * self.gate(hidden_states), weights

    return around


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that uses no name at all."""

    @functools.wraps(forward)
    def around(*args: Any, **kwargs: Any) -> Any:
        output, weights = forward(*args, **kwargs)
        return output + output, weights

    return around


def computed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator whose gate is in a function beside it."""

    def gate(layer: Any, states: torch.Tensor) -> torch.Tensor:
        return layer.gate(states)

    @functools.wraps(forward)
    def around(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = forward(self, hidden_states, *args, **kwargs)
        return output * gate(self, hidden_states), weights

    return around


HIDDEN = {
    "getattr": written(output='output = output * getattr(self, "gate")(hidden_states)'),
    "getattr of a computed name": written(
        output='output = output * getattr(self, "ga" + kwargs.get("x", "te"))(output)'
    ),
    "getattr with a default that is understood": written(
        output='name = "gate"; output = output * getattr(self, name, "dense")(hidden_states)'
    ),
    "nested function": written(output=NESTED),
    "lambda": written(output="output = (lambda states: states * self.gate(hidden_states))(output)"),
    "comprehension": written(output="output = [output * self.gate(hidden_states) for _ in (0,)][0]"),
    "norm of values": written(values="value = self.k_norm(value)"),
    "scale": written(output="output = output * self.scaling"),
    "residual": written(output="output = output + hidden_states"),
    "rotated values": written(values="value, _ = apply_rotary_pos_emb(value, value, cos, sin)"),
    "second projection": written(output="output = self.dense(output)"),
    "decorator": gated(written()),
    "decorator without names": doubled(written()),
    "decorator with a function beside it": computed(written()),
}
BY_NAMES = {name for name in HIDDEN if "getattr" in name or name in ("nested function", "lambda", "comprehension")} | {
    "decorator",
    "decorator with a function beside it",
}


def llama(forward: Callable[..., Any]) -> LlamaForCausalLM:
    """A model whose attention layers have this forward, and what it may use."""
    cls = type("HiddenAttention", (LlamaAttention,), {"forward": forward, "__module__": __name__})
    model = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.__class__ = cls
        attention.gate, attention.dense = nn.Linear(24, 24), nn.Linear(24, 24)
        attention.k_norm = nn.LayerNorm(attention.head_dim)
    return model


@contextmanager
def queries_of_zero(model: PreTrainedModel) -> Iterator[None]:
    projections = [module for name, module in model.named_modules() if name.endswith(("q_proj", ".q"))]
    before = [module.weight.detach().clone() for module in projections]
    with torch.no_grad():
        for module in projections:
            module.weight.zero_()
        yield
        for module, weight in zip(projections, before, strict=True):
            module.weight.copy_(weight)


def layers_of(model: nn.Module) -> list[SynthesizerMixin]:
    return [module for module in model.modules() if isinstance(module, SynthesizerMixin)]


def even(model: PreTrainedModel, variant: str = "random") -> PreTrainedModel:
    """Patched, with logits of 0."""
    for layer in layers_of(patch_model(model, variant)):
        nn.init.zeros_(layer.synthesizer.table)
    return model


@pytest.mark.parametrize("way", HIDDEN)
def test_a_layer_that_hides_a_gate_keeps_its_own_forward(way: str) -> None:
    model, ids = llama(HIDDEN[way]), torch.randint(2, 64, (2, 7))
    assert (find_layer_class(type(model.model.layers[0].self_attn)) is None) == (way in BY_NAMES)
    with queries_of_zero(model):
        expected = model(ids).logits
    even(model)
    assert all(isinstance(layer, StockForwardLayer) for layer in layers_of(model))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_the_same_forward_with_nothing_hidden_is_ours() -> None:
    for forward in (written(), LlamaAttention.forward):
        for layer in layers_of(patch_model(llama(forward), "random")):
            assert isinstance(layer, RotaryDecoderLayer)


@pytest.mark.parametrize("way", ["scale", "rotated values"])
def test_a_hidden_change_is_found_on_the_meta_device_and_in_a_drop_in_layer(way: str) -> None:
    with torch.device("meta"):
        assert all(
            isinstance(layer, StockForwardLayer) for layer in layers_of(patch_model(llama(HIDDEN[way]), "random"))
        )
    model = llama(HIDDEN[way])
    cls = type(layers_of(patch_model(llama(written()), "random"))[0])
    stock = type(model.model.layers[0].self_attn)
    drop_in = type("DropIn", (RotaryDecoderLayer, stock), {"stock_class": stock, "__module__": __name__})
    made = drop_in(model.config, layer_idx=0, synthesizer="random")
    assert isinstance(made, StockForwardLayer) and not issubclass(cls, StockForwardLayer)


def test_some_heads_of_a_layer_that_hides_a_gate_keep_all_queries() -> None:
    from hf_synthesizer import SynthesizerConfig

    model, ids = llama(HIDDEN["scale"]), torch.randint(2, 64, (2, 7))
    patch_model(model, SynthesizerConfig("random", heads=[0, 1]))
    assert all(layer.q_proj.weight.shape[0] == 24 for layer in layers_of(model))
    assert model(ids).logits.isfinite().all()


def test_a_layer_without_an_interface_that_hides_a_change_is_refused() -> None:
    head = "MPNetForSequenceClassification"
    cls = type("HiddenMPNet", (MPNetSelfAttention,), {"forward": doubled_first(MPNetSelfAttention.forward)})
    model, given = build(head), batch(head)
    for module in model.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = cls
    with torch.no_grad():
        expected = first_output(model(**given))
        with pytest.raises(UnsupportedModelError, match="HiddenMPNet computes more than"):
            patch_model(model, "random")
        assert not layers_of(model) and torch.equal(first_output(model(**given)), expected)


def doubled_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def around(*args: Any, **kwargs: Any) -> Any:
        output, *rest = forward(*args, **kwargs)
        return (output + output, *rest)

    return around


def test_the_check_takes_hardly_any_memory_and_no_random_numbers_of_the_user() -> None:
    config = LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    with torch.device("meta"):
        layer = LlamaAttention(config, layer_idx=0)
    copied = Copies().of(layer)
    assert sum(parameter.untyped_storage().nbytes() for parameter in copied.parameters()) < 1_000_000
    small = llama(HIDDEN["norm of values"]).model.layers[0].self_attn
    before = torch.get_rng_state()
    layer_class = type("Fresh", (RotaryDecoderLayer, type(small)), {"stock_class": type(small)})
    assert equals_stock(layer_class, small) is False and torch.equal(torch.get_rng_state(), before)
