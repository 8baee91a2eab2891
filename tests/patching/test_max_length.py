"""How long the sequences of a patch are where nobody says: the model's own maximum, unless its tables are too large to be made unasked."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel

from hf_synthesizer import InvalidConfigError, patch_model


def test_a_tiny_model_gets_the_tables_of_its_own_maximum() -> None:
    model = T5EncoderModel(T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=4, num_heads=4))
    patch_model(model, "random")
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert attention.synthesizer.table.shape == (4, 512, 512)


@pytest.mark.parametrize("variant", ["random", "dense+random", "factorized_random"])
@pytest.mark.parametrize("maximum", [131_072, 100_000])
def test_what_is_larger_than_the_model_and_a_gigabyte_is_refused_with_a_length_that_works(
    variant: str, maximum: int
) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=maximum,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with pytest.raises(InvalidConfigError, match=rf"{maximum:,} positions.*GB.*max_length=\d+") as caught:
        patch_model(model, variant)
    length = int(re.findall(r"max_length=(\d+)", str(caught.value))[0])
    patch_model(model, variant, max_length=length)
    made = sum(p.numel() for name, p in model.named_parameters() if ".synthesizer." in name)
    assert 1 < length < maximum and 2.5e8 / 4 < made < 2.5e8


def test_each_tower_has_its_own_maximum() -> None:
    tower = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=16)
    text = {**tower, "vocab_size": 64, "max_position_embeddings": 20_000}
    vision = {**tower, "image_size": 14, "patch_size": 2}
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision))
    with pytest.raises(InvalidConfigError, match=r"CLIPTextConfig allows sequences of 20,000 .*max_length=2048"):
        patch_model(model, "random")
    patch_model(model, "random", max_length=2048)
