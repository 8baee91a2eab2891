"""What variants that choose keys refuse: decoders that know no future, mixtures, options without a meaning."""

from __future__ import annotations

import pytest

from hf_synthesizer import (
    InvalidConfigError,
    UnsupportedModelError,
    patch_model,
)
from tests.choices.test_choosing import layer_of, tokens
from tests.helpers.models import WHOLE_SEQUENCE, batch, build, first_output


@pytest.mark.feature("quantized cache", refused=True)
@pytest.mark.feature("static cache", refused=True)
@pytest.mark.feature("generate with a cache", refused=True)
@pytest.mark.parametrize("variant", WHOLE_SEQUENCE)
@pytest.mark.parametrize("head", ["BertLMHeadModel", "T5ForConditionalGeneration"])
def test_decoders_are_refused_before_anything_is_changed(variant: str, head: str) -> None:
    model = build(head)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        UnsupportedModelError, match=f"{variant!r} chooses its keys over the whole sequence.*Patch an encoder"
    ):
        patch_model(model, variant)
    assert type(model).__name__ == head and model.config.model_type in ("bert", "t5")
    assert state.keys() == model.state_dict().keys()
    if head.startswith("T5"):
        patch_model(model, {"encoder": variant, "decoder": "sparse_fixed"})
        assert first_output(model(**batch(head))).isfinite().all()


def test_a_causal_call_of_a_layer_for_encoders_is_refused() -> None:
    for need_weights in (True, False):
        with pytest.raises(UnsupportedModelError, match="over the whole sequence, which a causal layer does not see"):
            layer_of("routing")(tokens(1, 5), is_causal=True, need_weights=need_weights)


@pytest.mark.parametrize("mixture", ["sparse_strided+random", "dense+lsh_simple", "routing+dot_product"])
def test_choices_are_no_part_of_mixtures(mixture: str) -> None:
    with pytest.raises(InvalidConfigError, match="chooses which keys.*Give it layers of its own"):
        patch_model(build("BertModel"), mixture)


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("lsh_simple", {"qnf": True}, "qnf=True has no meaning for the variant 'lsh_simple'"),
        ("lsh_simple", {"window": 8}, "window=8 has no meaning for the variant 'lsh_simple'"),
        ("alsh_sign", {"qnf": 1}, "qnf must be True or False, not 1"),
        ("routing", {"bucket_size": 8}, "bucket_size=8 has no meaning"),
        ("lsh_simple", {"bucket_size": 0}, "bucket_size must be a positive int, not 0"),
        ("lsh_simple", {"num_hashes": -1}, "num_hashes must be a positive int, not -1"),
        ("sparse_fixed", {"stride": 0}, "stride must be a positive int, not 0"),
        ("random", {"stride": 4}, "stride=4 has no meaning"),
    ],
)
def test_bad_options(variant: str, options: dict, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        patch_model(build("BertModel"), variant, **options)
