"""Layers without a Transformers model: shapes, parameter counts of the paper's Table 1, FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_synthesizer
from hf_synthesizer import SynthesizerAttention, SynthesizerConfig, count_flops, count_parameters, list_variants
from hf_synthesizer.synthesizers import build_synthesizer
from hf_synthesizer.synthesizers.registry import get_variant
from tests.helpers.models import CHOOSING, VARIANTS

D, H, N, K = 64, 4, 32, 8
A, B = 8, 4
COUNTS = {
    "random": H * N * N,
    "fixed_random": 0,
    "factorized_random": 2 * H * N * K,
    "dense": D * D + D * N,
    "factorized_dense": D * D + D * (A + B),
    "dot_product": 2 * D * D,
    "salience": D * H,
    "relative": H * (257 + 4),
    "relative_dense": D * D + D * 257 + H * 4,
    **dict.fromkeys(CHOOSING, D * D),
}
SHARED = {
    "random": N * N,
    "factorized_random": 2 * N * K,
    "dense": D * D + D // H * N,
    "factorized_dense": D * D + D // H * (A + B),
}


def test_every_registered_variant_has_a_count() -> None:
    assert set(COUNTS) == set(list_variants())


@pytest.mark.parametrize("variant", COUNTS)
def test_parameter_counts(variant: str) -> None:
    made = build_synthesizer(SynthesizerConfig(variant), D, H, N)
    assert count_parameters(made, biases=False) == COUNTS[variant]


@pytest.mark.parametrize("variant", SHARED)
def test_parameter_counts_with_shared_heads(variant: str) -> None:
    made = build_synthesizer(SynthesizerConfig(variant, share_heads=True), D, H, N)
    assert count_parameters(made, biases=False) == SHARED[variant]


@pytest.mark.parametrize(
    ("variant", "mixing", "components"),
    [
        ("random+dot_product", "softmax", 2),
        ("random+dot_product", "sum", 2),
        ("random+dense+dot_product", "softmax", 3),
        ("dense+salience", "softmax", 0),  # salience does not compete, and a lone competitor needs no weight
        ("dense+salience", "sum", 2),
        ("random+dense+salience", "softmax", 2),
    ],
)
def test_parameter_counts_of_mixtures(variant: str, mixing: str, components: int) -> None:
    made = build_synthesizer(SynthesizerConfig(variant, mixing=mixing), D, H, N)
    assert count_parameters(made, biases=False) == sum(COUNTS[part] for part in variant.split("+")) + H * components


def test_head_dimensions_that_do_not_multiply_to_the_width() -> None:
    made = build_synthesizer(SynthesizerConfig("dense"), 24, 3, 10, head_dim=6)
    assert count_parameters(made, biases=False) == 24 * 18 + 18 * 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_layer_shapes(variant: str) -> None:
    layer = SynthesizerAttention(D, H, variant=variant, max_length=N)
    output, weights = layer(torch.randn(2, 9, D))
    assert output.shape == (2, 9, D) and weights.shape == (2, H, 9, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 9))
    assert layer(torch.randn(2, 9, D), need_weights=False)[1] is None


@pytest.mark.parametrize(
    "name",
    [
        "DenseSynthesizer",
        "DotProductSynthesizer",
        "FactorizedDenseSynthesizer",
        "FactorizedRandomSynthesizer",
        "FixedRandomSynthesizer",
        "RandomSynthesizer",
        "RoutingSynthesizer",
        "SalienceSynthesizer",
        "SignALSHSynthesizer",
        "SimpleALSHSynthesizer",
        "SimpleLSHSynthesizer",
        "SparseFixedSynthesizer",
        "SparseStridedSynthesizer",
        "XboxALSHSynthesizer",
    ],
)
def test_each_variant_is_a_plain_module(name: str) -> None:
    made = getattr(hf_synthesizer, name)(D, H, N)
    assert isinstance(made, nn.Module) and get_variant(made.variant) is type(made)
    logits = made(torch.randn(2, 9, D)).materialize()
    assert logits.shape[-3:] == (H, 9, 9) and len(logits) in (1, 2)
    assert f"max_length={N}" in repr(made)


def test_a_mixture_is_a_plain_module() -> None:
    config = SynthesizerConfig("random+dense", mixing="sum")
    made = hf_synthesizer.MixtureSynthesizer(D, H, N, config)
    assert made(torch.randn(2, 9, D)).materialize().shape == (2, H, 9, 9)


def test_count_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    module[1].weight.requires_grad_(False)
    assert count_parameters(module) == 12 + 4 + 4
    assert count_parameters(module, trainable_only=False) == 12 + 4 + 16 + 4
    assert count_parameters(module, biases=False) == 12
    module[1] = module[0]
    assert count_parameters(module) == 16


def test_count_flops() -> None:
    assert count_flops(nn.Linear(3, 4), torch.randn(5, 3)) == 2 * 5 * 3 * 4
    layer = SynthesizerAttention(D, H, variant="random", max_length=N)
    projections, product = 2 * 2 * N * D * D, 2 * H * N * N * (D // H)
    assert count_flops(layer, torch.randn(1, N, D)) == projections + product
    dense = SynthesizerAttention(D, H, variant="dense", max_length=N)
    assert count_flops(dense, torch.randn(1, N, D)) == projections + product + 2 * N * D * D + 2 * N * D * N


@pytest.mark.parametrize("length", [16, 300])
@pytest.mark.parametrize("variant", ["random", "dense"])
def test_count_flops_sees_the_fast_routes_too(variant: str, length: int) -> None:
    layer, x = SynthesizerAttention(D, H, variant=variant, max_length=length), torch.randn(1, length, D)
    assert count_flops(layer, x, need_weights=False) == count_flops(layer, x)


def test_configs_are_values() -> None:
    config = SynthesizerConfig(" random + dot_product ", mixing="sum")
    assert config.variant == "random+dot_product" and config.parts == ("random", "dot_product")
    assert SynthesizerConfig.from_dict(config.to_dict()) == config and hash(config) == hash(config.replace())
    assert config.replace(max_length=9).max_length == 9
    with pytest.raises(AttributeError):
        config.rank = 3  # type: ignore[misc]
    factors = SynthesizerConfig("factorized_dense", factors=[8, 4])  # type: ignore[arg-type]
    assert factors.to_dict() == {"variant": "factorized_dense", "max_length": None, "factors": [8, 4]}
