"""Masks that hide tokens between others (a prompt padded on the right, a hidden token): steps equal one pass, as in stock."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_synthesizer import SynthesizerConfig, UnsupportedModelError, patch_model
from hf_synthesizer.layers.mixin import SynthesizerMixin
from tests.helpers.models import build, randomize

HEADS = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertLMHeadModel", "OPTForCausalLM", "StableLmForCausalLM")
VARIANTS = {
    "random": "random",
    "dense+salience": "dense+salience",
    "random+dot_product": "random+dot_product",
    "one head": SynthesizerConfig("factorized_dense", heads=[1]),
}
GAPS = {"padded on the right": [4, 5], "a hidden token": [2], "on both sides": [0, 4, 5]}
LENGTH, PROMPT = 10, 6


def patched(head: str, variant: str | SynthesizerConfig) -> PreTrainedModel:
    model = patch_model(build(head), variant)
    for module in model.modules():
        if isinstance(module, SynthesizerMixin):
            randomize(module.synthesizer)
    return model


def masked(hidden: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and a mask whose first row hides some."""
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    keep[0, hidden] = 0
    return torch.randint(2, 64, (2, LENGTH)), keep


def assert_steps_equal_one_pass(
    model: PreTrainedModel, ids: torch.Tensor, keep: torch.Tensor, positions: torch.Tensor | None, chunk: int = 1
) -> None:
    def named(start: int, end: int) -> dict[str, torch.Tensor]:
        return {} if positions is None else {"position_ids": positions[:, start:end]}

    with torch.no_grad():
        whole = model(ids, attention_mask=keep, use_cache=False, **named(0, LENGTH)).logits
        output = model(ids[:, :PROMPT], attention_mask=keep[:, :PROMPT], use_cache=True, **named(0, PROMPT))
        parts = [output.logits]
        for start in range(PROMPT, LENGTH, chunk):
            end = start + chunk
            output = model(
                ids[:, start:end],
                attention_mask=keep[:, :end],
                past_key_values=output.past_key_values,
                use_cache=True,
                **named(start, end),
            )
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[keep.bool()], whole[keep.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", HEADS)
def test_steps_behind_a_gap_are_those_of_one_pass(head: str, variant: str, gap: str) -> None:
    model = patched(head, VARIANTS[variant])
    ids, keep = masked(GAPS[gap])
    assert_steps_equal_one_pass(model, ids, keep, (keep.cumsum(-1) - 1).clamp(min=0))
    assert_steps_equal_one_pass(model, ids, keep, None)


def test_several_tokens_at_a_time_behind_a_gap_and_with_one_between_them() -> None:
    model, (ids, keep) = patched("LlamaForCausalLM", "random"), masked([1, 4, 5, 7])
    assert_steps_equal_one_pass(model, ids, keep, (keep.cumsum(-1) - 1).clamp(min=0), chunk=2)
    assert_steps_equal_one_pass(model, ids, keep, torch.arange(LENGTH).expand(2, -1), chunk=2)


@pytest.mark.parametrize("head", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_generation_from_a_prompt_padded_on_the_right_is_refused(head: str) -> None:
    """Transformers lets the positions of new tokens go on from those of the padding, which count no tokens at all."""
    model, ids, keep = (
        patched(head, "random"),
        torch.randint(2, 64, (2, PROMPT)),
        torch.ones(2, PROMPT, dtype=torch.long),
    )
    keep[0, 4:] = 0
    with pytest.raises(UnsupportedModelError, match="pad prompts on the left"):
        model.generate(ids, attention_mask=keep, max_new_tokens=4, do_sample=False)
    assert model.generate(ids, attention_mask=keep, max_new_tokens=4, use_cache=False).shape[1] > PROMPT


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("head", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_a_hidden_token_in_a_prompt_changes_nothing_about_caches(head: str, settings: dict) -> None:
    model, ids, keep = patched(head, "random+salience"), torch.randint(2, 64, (2, PROMPT)), torch.ones(2, PROMPT)
    keep[0, [0, 3]] = 0
    limits = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    beams = {name: value for name, value in settings.items() if name == "num_beams"}
    expected = model.generate(ids, attention_mask=keep.long(), use_cache=False, **limits, **beams)
    assert torch.equal(model.generate(ids, attention_mask=keep.long(), **limits, **settings), expected)


def test_positions_that_count_neither_all_nor_the_visible_tokens_are_refused() -> None:
    model, (ids, keep) = patched("LlamaForCausalLM", "random"), masked([2, 3])
    with torch.no_grad():
        cache = model(ids[:, :PROMPT], attention_mask=keep[:, :PROMPT], use_cache=True).past_key_values
        with pytest.raises(UnsupportedModelError, match="count neither all tokens nor the visible ones"):
            model(
                ids[:, PROMPT : PROMPT + 1],
                attention_mask=keep[:, : PROMPT + 1],
                past_key_values=cache,
                position_ids=torch.full((2, 1), PROMPT - 1),
            )
