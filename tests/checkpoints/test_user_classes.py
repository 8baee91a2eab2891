"""A model class that a user wrote around a base model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_synthesizer import UnsupportedModelError, patch_model
from tests.helpers.models import build

CLASS = """
class MyModel(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        {base}
        self.stars = torch.nn.Linear(config.hidden_size, 5)
        self.post_init()
"""


def test_the_advice_for_a_model_class_of_the_user_works(tmp_path: Path) -> None:
    """What the message quotes is run, in the order in which it is quoted."""
    names: dict[str, Any] = {"torch": torch, "folder": str(tmp_path), "__name__": __name__}
    names.update(
        {name: getattr(transformers, name) for name in ("AutoConfig", "AutoModel", "BertModel", "BertPreTrainedModel")}
    )
    exec(CLASS.format(base="self.bert = BertModel(config)"), names)
    with pytest.raises(UnsupportedModelError, match="Patch its base model instead") as caught:
        patch_model(names["MyModel"](build("BertModel").config), "dense")
    hand_on, base, load = re.findall(r"`(.*?)`", str(caught.value))
    exec(CLASS.format(base=base), names)
    model = names["model"] = names["MyModel"](build("BertModel").config)
    patch_model(model.bert, "dense")
    exec(hand_on, names)
    model.save_pretrained(tmp_path)
    loaded = eval(load, names)
    assert type(loaded) is names["MyModel"]
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
