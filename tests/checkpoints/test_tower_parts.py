"""From the checkpoint of a patched model of two towers: each tower by itself, and a head on one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification, LlavaForConditionalGeneration, PreTrainedModel

from hf_synthesizer import CheckpointMismatchError, models, patch_model
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.models import randomize
from tests.patching.test_towers import clip, given, llava, siglip

ROOT = Path(__file__).parents[2]
WHOLE = {"CLIP": clip, "Siglip": siglip}
LAYERS: dict[str, Any] = {"both": None, "vision": {"vision_model": True}, "text": {"text_model": True}}
CASES = [(name, layers) for name in WHOLE for layers in LAYERS]


def patched(name: str, layers: str) -> PreTrainedModel:
    model = patch_model(WHOLE[name](), "random+dot_product", layers=LAYERS[layers])
    for module in model.modules():
        if isinstance(module, SynthesizerMixin):
            randomize(module.synthesizer)
    return model


def seen(tower: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    name = tower.main_input_name
    with torch.no_grad():
        return tower.eval()(**{name: inputs[name]}).last_hidden_state


def count(model: PreTrainedModel) -> int:
    return sum(isinstance(module, SynthesizerMixin) for module in model.modules())


@pytest.mark.parametrize("tower", ["Vision", "Text"])
@pytest.mark.parametrize(("name", "layers"), CASES)
def test_a_tower_of_a_patched_model_is_loaded_by_its_own_class(
    tmp_path: Path, name: str, layers: str, tower: str
) -> None:
    whole, inputs = patched(name, layers), given("clip")
    whole.save_pretrained(tmp_path / "whole")
    own = getattr(models, f"Synthesizer{name}{tower}Model")
    part, info = own.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"] and count(part) == (2 if layers in ("both", tower.lower()) else 0)
    expected = seen(getattr(whole, f"{tower.lower()}_model"), inputs)
    assert torch.equal(seen(part, inputs), expected)
    part.save_pretrained(tmp_path / "part")
    assert torch.equal(seen(own.from_pretrained(tmp_path / "part"), inputs), expected)


@pytest.mark.parametrize(("name", "layers"), CASES)
def test_a_classifier_of_images_takes_the_tower_of_a_patched_model(tmp_path: Path, name: str, layers: str) -> None:
    whole, inputs = patched(name, layers), given("clip")
    whole.save_pretrained(tmp_path / "whole")
    head, info = AutoModelForImageClassification.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert torch.equal(seen(head.vision_model, inputs), seen(whole.vision_model, inputs))
    head.save_pretrained(tmp_path / "head")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "head")
    with torch.no_grad():
        pixels = inputs["pixel_values"]
        assert torch.equal(again.eval()(pixels).logits, head.eval()(pixels).logits)


def test_a_new_process_loads_the_tower_and_the_classifier(tmp_path: Path) -> None:
    patched("CLIP", "both").save_pretrained(tmp_path)
    script = (
        "import sys, hf_synthesizer, transformers\n"
        "from hf_synthesizer.models import SynthesizerCLIPVisionModel\n"
        "print(type(SynthesizerCLIPVisionModel.from_pretrained(sys.argv[1])).__name__)\n"
        "print(type(transformers.AutoModelForImageClassification.from_pretrained(sys.argv[1])).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split()[-2:] == ["SynthesizerCLIPVisionModel", "SynthesizerCLIPForImageClassification"], (
        done.stderr
    )


def test_a_part_that_the_description_does_not_name_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = llava()
    assert isinstance(model, LlavaForConditionalGeneration)
    patch_model(model, "random").save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointMismatchError, match="describes the stacks language_model, vision_tower.*take the part"
    ):
        models.SynthesizerLlamaModel.from_pretrained(tmp_path)
