"""Generation up to the last position, and beyond it, by a model of each script: as with short outputs, and then an error."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_synthesizer import SequenceTooLongError, patch_model
from tests.helpers.models import mask
from tests.helpers.task_rows import build
from tests.layers.test_decoding import STRATEGIES
from tests.synthesizers.test_laws import randomize_synthesizers

LONGEST = 32
DECODERS = ("llama", "gpt2")
MODELS = (*DECODERS, "t5", "marian", "mbart", "bart")


def patched(kind: str, variant: str) -> PreTrainedModel:
    model = patch_model(build(kind).eval(), variant, max_length=LONGEST)
    randomize_synthesizers(model)
    return model


def generate(model: PreTrainedModel, length: int = LONGEST, **settings) -> torch.Tensor:
    """From three rows of different lengths: what a decoder continues is padded on the left, what an encoder reads on the right."""
    torch.manual_seed(1)
    ids = torch.randint(5, 20, (3, 6))
    keep = mask(3, 6, "right" if model.config.is_encoder_decoder else "left")
    return model.generate(ids, attention_mask=keep, max_length=length, min_length=length, pad_token_id=0, **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", ["factorized_dense+salience", "random+dot_product"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_long_output_is_the_same_with_each_cache(kind: str, variant: str, strategy: str) -> None:
    model, settings = patched(kind, variant), STRATEGIES[strategy]
    uncached = generate(model, use_cache=False, **settings)
    assert uncached.shape == (3, LONGEST)
    assert torch.equal(generate(model, **settings), uncached)
    assert torch.equal(generate(model, cache_implementation="static", **settings), uncached)


@pytest.mark.parametrize("strategy", ["greedy", "beam"])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_long_output_of_a_padded_batch_is_that_of_each_row(kind: str, strategy: str) -> None:
    model, settings = patched(kind, "dense"), STRATEGIES[strategy]
    together = generate(model, **settings)
    torch.manual_seed(1)
    ids = torch.randint(5, 20, (3, 6))
    for row in range(3):
        length = LONGEST - row  # its own tokens are fewer
        alone = model.generate(
            ids[row : row + 1, row:], max_length=length, min_length=length, pad_token_id=0, **settings
        )
        assert torch.equal(together[row, row:], alone[0])


@pytest.mark.parametrize(
    "settings", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str
)
@pytest.mark.parametrize("kind", MODELS)
def test_an_output_beyond_the_last_position_is_refused(kind: str, settings: dict) -> None:
    with pytest.raises(SequenceTooLongError, match=f"N = max_length = {LONGEST}"):
        generate(patched(kind, "random+salience"), LONGEST + 6, do_sample=False, **settings)
