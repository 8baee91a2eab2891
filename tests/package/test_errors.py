"""Each error of the library, and what its message tells the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, ResNetConfig, ResNetModel
from transformers.models.bert.modeling_bert import BertModel, BertPreTrainedModel

from hf_synthesizer import (
    CheckpointMismatchError,
    DenseSynthesizer,
    InvalidConfigError,
    NoMatchingLayerError,
    SequenceTooLongError,
    SynthesizerAttention,
    SynthesizerConfig,
    SynthesizerError,
    UnknownVariantError,
    UnsupportedModelError,
    patch_model,
    register_variant,
)
from hf_synthesizer.models.description import plan_from_json
from tests.helpers.models import bert_config, build


def test_every_error_is_a_synthesizer_error() -> None:
    import hf_synthesizer

    errors = [getattr(hf_synthesizer, name) for name in hf_synthesizer.__all__ if name.endswith("Error")]
    assert len(errors) == 10 and all(issubclass(error, SynthesizerError) for error in errors)
    assert issubclass(UnknownVariantError, ValueError) and issubclass(SequenceTooLongError, ValueError)


@pytest.mark.parametrize(
    ("variant", "suggestion"),
    [("factorised_dense", "factorized_dense"), ("random+dot_produkt", "dot_product"), ("Dense", "dense")],
)
def test_unknown_variant(variant: str, suggestion: str) -> None:
    with pytest.raises(
        UnknownVariantError, match=rf"Unknown variant .*Known are dense.*Did you mean '{suggestion}'\?"
    ):
        patch_model(build("BertModel"), variant)


@pytest.mark.parametrize("variant", [None, 3, "", "random+", "+"])
def test_no_variant_at_all(variant) -> None:
    with pytest.raises(UnknownVariantError):
        patch_model(build("BertModel"), variant)


def test_a_part_named_twice() -> None:
    with pytest.raises(InvalidConfigError, match="names a part twice"):
        SynthesizerConfig("random+dense+random")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([7], "No layer 7 in this model, which has encoder layers 0 to 1"),
        ([], "matches no self-attention layer. The model has encoder layers 0 to 1"),
        (slice(5, 9), "matches no self-attention layer"),
        (lambda name, module: False, "matches no self-attention layer"),
        ({"decoder": [0]}, "No stack 'decoder' in this model, which has encoder"),
        ("0", "takes indices, a slice, a function"),
        ([0.5], "not 0.5"),
    ],
)
def test_no_matching_layer(layers, message: str) -> None:
    with pytest.raises(NoMatchingLayerError, match=message):
        patch_model(build("BertModel"), "random", layers=layers)


@pytest.mark.parametrize(
    ("hybrid", "message"),
    [
        ({5: "random"}, "No layer 5"),
        ({"encodr": "random"}, "No layer 'encodr' in this model.*Did you mean 'encoder'"),
        ({}, "hybrid is empty"),
    ],
)
def test_no_matching_layer_of_a_hybrid(hybrid, message: str) -> None:
    with pytest.raises(NoMatchingLayerError, match=message):
        patch_model(build("BertModel"), hybrid)


def test_a_hybrid_with_layers() -> None:
    with pytest.raises(InvalidConfigError, match="leave layers= out"):
        patch_model(build("BertModel"), {0: "random"}, layers=[0])


def test_unsupported_models() -> None:
    tiny = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    with pytest.raises(
        UnsupportedModelError, match="ResNetModel has no self-attention .* register its attention class"
    ):
        patch_model(tiny, "random")
    with pytest.raises(UnsupportedModelError, match=r"not on Linear"):
        patch_model(nn.Linear(2, 2), "random")
    with pytest.raises(UnsupportedModelError, match=r"wrap another model: patch that one \(module\)"):
        patch_model(nn.DataParallel(build("BertModel")), "random")


def test_one_stack_of_a_model_is_not_patched_alone() -> None:
    with pytest.raises(UnsupportedModelError, match=r"part of a larger model.*layers=\{'encoder': True\}"):
        patch_model(build("T5Model").encoder, "random")


def test_a_users_own_head_is_sent_to_its_base_model() -> None:
    class OwnHead(BertPreTrainedModel):
        def __init__(self, config: BertConfig):
            super().__init__(config)
            self.bert = BertModel(config)
            self.post_init()

    model = OwnHead(bert_config())
    with pytest.raises(UnsupportedModelError, match=r"Patch its base model instead: patch_model\(model.bert"):
        patch_model(model, "random")
    patch_model(model.bert, "random")


@pytest.mark.parametrize("variant", ["random", "dense", "factorized_random", "factorized_dense", "random+salience"])
def test_a_sequence_that_is_too_long(variant: str) -> None:
    model = patch_model(build("BertModel"), variant, max_length=8)
    message = (
        "length L = 9, but .* at most N = max_length = 8 .*Truncate.*for a pipeline, pass truncation=True and max_length=8 .*"
        "SentenceTransformer, set max_seq_length = 8.*max_length=9"
    )
    with pytest.raises(SequenceTooLongError, match=message):
        model(input_ids=torch.ones(1, 9, dtype=torch.long))
    with pytest.raises(SequenceTooLongError, match=message):
        SynthesizerAttention(8, 2, variant=variant, max_length=8)(torch.randn(1, 9, 8))


def test_position_ids_that_are_too_large() -> None:
    model = patch_model(build("BertModel"), "random", max_length=8)
    with pytest.raises(SequenceTooLongError, match="position_ids name position 8.*Truncate.*max_length=9"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), position_ids=torch.tensor([[0, 1, 2, 8]]))


def test_a_bad_pair_of_factors() -> None:
    for make in (
        lambda: patch_model(build("BertModel"), "factorized_dense", factors=(4, 5)),
        lambda: SynthesizerConfig("factorized_dense", max_length=24, factors=(4, 5)),
    ):
        with pytest.raises(InvalidConfigError, match=r"factors=\(4, 5\) give a·b = 20 columns, but max_length = 24"):
            make()
    with pytest.raises(InvalidConfigError, match=r"factors must be a pair \(a, b\) of positive ints, not \(4,\)"):
        SynthesizerConfig("factorized_dense", factors=(4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rnak": 4}, "Unknown option 'rnak'.*Did you mean 'rank'"),
        ({"mixing": "product"}, "mixing must be 'softmax' or 'sum', not 'product'"),
        ({"mixing": "sum"}, "mixing='sum' has no meaning for the variant 'factorized_random'"),
        ({"rank": 0}, "rank must be a positive int, not 0"),
        ({"max_length": -1}, "max_length must be a positive int, not -1"),
        ({"init": "handmade"}, "init must be 'default' or 'handcrafted'"),
        ({"init": "handcrafted"}, "init='handcrafted' has no meaning"),
        ({"share_heads": "yes"}, "share_heads must be True or False"),
        ({"options": [1]}, r"options must be a dict, not \[1\]"),
    ],
)
def test_a_bad_option(options, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        patch_model(build("BertModel"), "factorized_random", **options)


def test_an_unknown_key_in_a_saved_configuration() -> None:
    with pytest.raises(InvalidConfigError, match="Unknown option 'tempo'"):
        SynthesizerConfig.from_dict({"variant": "random", "tempo": 3})
    with pytest.raises(InvalidConfigError, match="is a dict with a 'variant'; found None"):
        SynthesizerConfig.from_dict(None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointMismatchError, match="Unknown option 'tempo'"):
        plan_from_json({"format_version": 1, "configs": [{"variant": "random", "tempo": 3}], "layers": {}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "Expected a description"),
        ({"format_version": 99, "configs": [], "layers": {}}, "format_version 99.*Upgrade it"),
        ({"format_version": 1, "configs": [], "layers": {}, "more": 1}, "Unknown key 'more'"),
        ({"format_version": 1, "configs": [], "layers": {"encoder": [0]}}, "damaged"),
        ({"format_version": 1}, "damaged"),
        ({"format_version": 1, "configs": [{"variant": "gone"}], "layers": {}}, "Unknown variant 'gone'"),
    ],
)
def test_a_damaged_description(data, message: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        plan_from_json(data)


def test_backends_that_are_not_served_are_refused() -> None:
    model = patch_model(build("BertModel"), "random")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match=r"eager and sdpa; this model asks for 'flex_attention'.*sdpa"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_cross_attention_through_a_synthesizer_is_refused() -> None:
    module = patch_model(build("T5Model"), "random").encoder.block[0].layer[0].SelfAttention
    with pytest.raises(UnsupportedModelError, match="self-attention only"):
        module(torch.randn(1, 3, 24), key_value_states=torch.randn(1, 4, 24))


def test_standalone_layers_say_what_is_missing() -> None:
    with pytest.raises(InvalidConfigError, match="max_length is missing"):
        SynthesizerAttention(8, 2, variant="random")
    with pytest.raises(InvalidConfigError, match="not a multiple"):
        SynthesizerAttention(8, 3, variant="random", max_length=4)


def test_registering_a_taken_or_impossible_name() -> None:
    with pytest.raises(InvalidConfigError, match="registered already, by DenseSynthesizer"):
        register_variant("dense")(type("Other", (DenseSynthesizer,), {}))
    with pytest.raises(InvalidConfigError, match="must be an identifier"):
        register_variant("a+b")
