"""generate() beyond the positions of a patch is refused at its start, where the number is known, and not at the last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_synthesizer import SequenceTooLongError, patch_model
from tests.helpers.models import build
from tests.layers.test_heads_in_models import causal_model


class Steps:
    """How often a model is called."""

    def __init__(self, model: PreTrainedModel):
        self.count = 0
        model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.count += 1


def patched(kind: str, max_length: int = 16) -> PreTrainedModel:
    model = causal_model(kind) if kind != "t5" else build("T5ForConditionalGeneration")
    patch_model(model.eval(), "random", max_length=max_length)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("asked", [{"max_new_tokens": 40}, {"max_length": 46}, {"generation_config": None}])
def test_more_new_tokens_than_there_is_room_for_are_refused_at_the_start(kind: str, asked: dict[str, Any]) -> None:
    model, prompt = patched(kind), torch.randint(3, 60, (2, 6))
    if "generation_config" in asked:
        asked = {"generation_config": GenerationConfig(max_new_tokens=40, pad_token_id=0)}
    steps = Steps(model)
    with pytest.raises(SequenceTooLongError, match=r"generate\(\) is asked for up to .*N = max_length = 16 positions"):
        model.generate(prompt, do_sample=False, **asked)
    assert steps.count == 0


@pytest.mark.parametrize(("kind", "room"), [("gpt2", 11), ("llama", 11), ("t5", 16)])
def test_as_many_new_tokens_as_there_is_room_for(kind: str, room: int) -> None:
    """The last token is never read, so that there may be one more than positions."""
    model, prompt = patched(kind), torch.randint(3, 60, (2, 6))
    model.generate(prompt, max_new_tokens=room, do_sample=False)
    with pytest.raises(SequenceTooLongError, match="1 too few"):
        model.generate(prompt, max_new_tokens=room + 1, do_sample=False)


def test_padding_on_the_left_takes_no_room() -> None:
    model, prompt = patched("llama"), torch.randint(3, 60, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    model.generate(prompt, attention_mask=mask, max_new_tokens=13, do_sample=False)
    with pytest.raises(SequenceTooLongError, match="1 too few"):
        model.generate(prompt, attention_mask=mask, max_new_tokens=14, do_sample=False)


def test_a_model_whose_own_settings_ask_for_more_may_end_before() -> None:
    model, prompt = patched("gpt2"), torch.randint(3, 60, (1, 6))
    model.generation_config.max_length = 46
    first = int(model(prompt).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first
    assert model.generate(prompt, do_sample=False).shape == (1, 7)
