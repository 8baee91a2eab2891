"""Models made of models, patched as a whole or by the name of a part: saved, loaded, generating, converted back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    EncoderDecoderModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipConfig,
    SiglipModel,
    SpeechEncoderDecoderModel,
    VisionEncoderDecoderModel,
)

from hf_synthesizer import NoMatchingLayerError, UnsupportedModelError, patch_model, patch_report, unpatch_model
from hf_synthesizer.checkpoints.auto import serving_auto_classes
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.layers import GROUPED, TEXT
from tests.helpers.models import batch, build, randomize

OF_TEXT_ALONE = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
TOWER = {name: value for name, value in TEXT.items() if name not in OF_TEXT_ALONE}
TOWER |= {"image_size": 8, "patch_size": 4, "num_channels": 1, "projection_dim": 8}
TEXT_TOWER = {**TEXT, "projection_dim": 8}


def decoder() -> PreTrainedModel:
    return build("BertLMHeadModel", add_cross_attention=True, bos_token_id=2, eos_token_id=1)


def of_two(cls: type, encoder: str) -> PreTrainedModel:
    model = cls(encoder=build(encoder).base_model, decoder=decoder())
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 2
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    return model.eval()


def clip() -> PreTrainedModel:
    return CLIPModel(CLIPConfig(text_config=TEXT_TOWER, vision_config=TOWER, projection_dim=8)).eval()


def siglip() -> PreTrainedModel:
    return SiglipModel(SiglipConfig(text_config=TEXT_TOWER, vision_config=TOWER)).eval()


def llava() -> PreTrainedModel:
    config = LlavaConfig(
        text_config={"model_type": "llama", **GROUPED},
        vision_config={"model_type": "clip_vision_model", **TOWER},
        image_token_index=5,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config).eval()


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, int]]] = {
    "text to text": (lambda: of_two(EncoderDecoderModel, "BertModel"), {"encoder": 2, "decoder": 2}),
    "image to text": (
        lambda: of_two(VisionEncoderDecoderModel, "ViTForImageClassification"),
        {"encoder": 2, "decoder": 2},
    ),
    "speech to text": (
        lambda: of_two(SpeechEncoderDecoderModel, "Wav2Vec2ForSequenceClassification"),
        {"encoder": 2, "decoder": 2},
    ),
    "clip": (clip, {"text_model": 2, "vision_model": 2}),
    "siglip": (siglip, {"text_model": 2, "vision_model": 2}),
    "llava": (llava, {"vision_tower": 2, "language_model": 2}),
}
CASES = [(name, stack) for name, (_, stacks) in MODELS.items() for stack in (*stacks, None)]
GENERATING = ("text to text", "image to text", "speech to text", "llava")


def given(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    image = {"pixel_values": torch.randn(2, 1, 8, 8)}
    ids = torch.randint(6, 60, (2, 6))
    if name == "llava":
        return {**image, "input_ids": torch.cat([torch.full((2, 4), 5), ids], dim=1)}
    if name in ("clip", "siglip"):
        return {**image, "input_ids": ids}
    encoder = {"text to text": "BertModel", "image to text": "ViTForImageClassification"}
    return batch(encoder.get(name, "Wav2Vec2ForSequenceClassification"))


def run(model: Any, name: str) -> list[torch.Tensor]:
    more = {"decoder_input_ids": torch.tensor([[2, 7, 9, 11]] * 3)} if " to text" in name else {}
    with torch.no_grad():
        output = model.eval()(**given(name), **more)
    names = ("logits", "logits_per_image", "text_embeds", "image_embeds")
    return [output[name] for name in names if output.get(name) is not None]


def layers(model: nn.Module) -> list[SynthesizerMixin]:
    return [module for module in model.modules() if isinstance(module, SynthesizerMixin)]


def patched(name: str, stack: str | None, variant: str = "random+salience") -> PreTrainedModel:
    model = patch_model(MODELS[name][0](), variant, layers=None if stack is None else {stack: True})
    for layer in layers(model):
        randomize(layer.synthesizer)
    return model


@pytest.mark.parametrize(("name", "stack"), CASES)
def test_a_part_or_the_whole_is_patched_saved_loaded_and_converted_back(
    tmp_path: Path, name: str, stack: str | None
) -> None:
    make, stacks = MODELS[name]
    torch.manual_seed(0)
    stock = make()
    before, cls = run(stock, name), type(stock)
    torch.manual_seed(0)
    model = patched(name, stack)
    assert len(layers(model)) == (sum(stacks.values()) if stack is None else stacks[stack])
    assert isinstance(model, cls) and type(model).__name__ == f"Synthesizer{cls.__name__}"
    changed = run(model, name)
    assert not all(map(torch.equal, changed, before))
    model.save_pretrained(tmp_path)
    for loader in (type(model), getattr(transformers, serving_auto_classes(model)[0])):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is type(model) and all(map(torch.equal, run(loaded, name), changed))
    assert patch_report(loaded).layers == patch_report(model).layers
    unpatch_model(model)
    assert type(model) is cls and not layers(model) and all(map(torch.equal, run(model, name), before))


@pytest.mark.parametrize("name", MODELS)
def test_a_sum_with_dot_product_starts_as_the_stock_model(name: str) -> None:
    model = MODELS[name][0]()
    before = run(model, name)
    patch_model(model, "random+dot_product", mixing="sum")
    for found, expected in zip(run(model, name), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["random", "factorized_dense+salience"])
@pytest.mark.parametrize("name", GENERATING)
def test_a_patched_whole_generates(tmp_path: Path, name: str, variant: str) -> None:
    model, inputs = patched(name, None, variant), given(name)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, use_cache=False, **settings)
    assert torch.equal(model.generate(**inputs, **settings), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).generate(**inputs, **settings), expected)


def test_each_tower_has_tables_of_its_own_length() -> None:
    lengths = {layer.synthesizer.max_length for layer in layers(patched("clip", None))}
    assert lengths == {TEXT["max_position_embeddings"], 4 + 2}  # four patches, and room for tokens beside them


def test_a_tower_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(NoMatchingLayerError, match="No stack 'text'.*text_model, vision_model.*Did you mean"):
        patch_model(clip(), "random", layers={"text": True})


def test_a_stack_of_a_composite_alone_is_refused_with_the_way_out() -> None:
    model = clip()
    with pytest.raises(UnsupportedModelError, match=r"layers="):
        patch_model(model.vision_model.encoder, "random")
    assert not layers(model)
