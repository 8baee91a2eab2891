"""Patched models as parts of larger ones: they save and load as stock parts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertPreTrainedModel,
    EncoderDecoderModel,
    PreTrainedModel,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)

from hf_synthesizer import CheckpointMismatchError, SynthesizerConfig, patch_model
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.models import batch, build

IDS = torch.tensor([[2, 5, 9, 12, 7, 3], [2, 8, 15, 3, 0, 0]])
VARIANTS = ("dense+salience", "random+dot_product", "sparse_strided")


def part(head: str, variant: str | None, **changes: Any) -> PreTrainedModel:
    model = build(head, **changes)
    return model if variant is None else patch_model(model, variant)


def text_to_text(encoder: str | None, decoder: str | None) -> EncoderDecoderModel:
    return EncoderDecoderModel(
        encoder=part("BertModel", encoder), decoder=part("BertLMHeadModel", decoder, add_cross_attention=True)
    ).eval()


def image_to_text(decoder: str) -> VisionEncoderDecoderModel:
    vision = ViTModel(
        ViTConfig(
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            num_channels=1,
        )
    )
    text = part("BertLMHeadModel", decoder, add_cross_attention=True)
    return VisionEncoderDecoderModel(encoder=vision, decoder=text).eval()


def run(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    vision = isinstance(model, VisionEncoderDecoderModel)
    inputs = {"pixel_values": torch.randn(2, 1, 8, 8)} if vision else {"input_ids": IDS}
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=IDS[:, :4]).logits


def layers(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, SynthesizerMixin)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("which", ["encoder", "decoder", "both"])
def test_an_encoder_decoder_model_saves_and_loads(tmp_path: Path, variant: str, which: str) -> None:
    model = text_to_text(variant if which != "decoder" else None, variant if which != "encoder" else None)
    model.save_pretrained(tmp_path)
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    assert layers(loaded) == layers(model) and len(layers(model)) == (4 if which == "both" else 2)
    assert torch.equal(run(loaded), run(model))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(run(EncoderDecoderModel.from_pretrained(tmp_path / "again")), run(model))


def test_a_vision_encoder_decoder_model_saves_and_loads(tmp_path: Path) -> None:
    model = image_to_text("dense+dot_product")
    model.save_pretrained(tmp_path)
    loaded = VisionEncoderDecoderModel.from_pretrained(tmp_path)
    assert layers(loaded) == layers(model) and torch.equal(run(loaded), run(model))


def test_a_composite_is_built_from_the_checkpoints_of_its_parts(tmp_path: Path) -> None:
    part("BertModel", "dense").save_pretrained(tmp_path / "encoder")
    part("BertLMHeadModel", "random").save_pretrained(tmp_path / "decoder")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder").eval()
    model.save_pretrained(tmp_path / "both")
    loaded = EncoderDecoderModel.from_pretrained(tmp_path / "both")
    assert len(layers(loaded)) == 4 and torch.equal(run(loaded), run(model))


def test_a_composite_checkpoint_of_another_patch_is_refused(tmp_path: Path) -> None:
    model = text_to_text(SynthesizerConfig("sparse_strided", stride=2), None)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.encoder.synthesizer["configs"][0]["stride"] = 8
    with pytest.raises(CheckpointMismatchError, match="'encoder.layer.0.attention.self'.*stride is 2, here it is 8"):
        EncoderDecoderModel.from_pretrained(tmp_path, config=config)


class ReviewModel(BertPreTrainedModel):
    """A head of somebody's own, as docs/checkpoints.md writes it: the base is what the config says, stock or patched."""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.bert = AutoModel.from_config(config)
        self.stars = torch.nn.Linear(config.hidden_size, 5)
        self.post_init()

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.stars(self.bert(**inputs).pooler_output)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_of_ones_own_around_a_patched_base_saves_and_loads(tmp_path: Path, variant: str) -> None:
    base = part("BertModel", variant)
    model = ReviewModel(base.config).eval()
    model.bert.load_state_dict(base.state_dict())
    model.save_pretrained(tmp_path)
    loaded = ReviewModel.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
    inputs = batch("BertModel")
    assert layers(loaded) == layers(model) and torch.equal(loaded(**inputs), model(**inputs))
    with pytest.raises(RuntimeError, match="mismatch|size"):
        ReviewModel.from_pretrained(tmp_path, config=BertConfig.from_pretrained(tmp_path))


def test_a_base_that_is_patched_inside_a_head_of_ones_own_saves_and_loads(tmp_path: Path) -> None:
    model = ReviewModel(build("BertModel").config).eval()
    patch_model(model.bert, "dense")
    model.config = model.bert.config
    model.save_pretrained(tmp_path)
    loaded = ReviewModel.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
    inputs = batch("BertModel")
    assert len(layers(loaded)) == 2 and torch.equal(loaded(**inputs), model(**inputs))
