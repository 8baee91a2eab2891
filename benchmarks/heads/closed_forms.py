"""The closed forms of all heads of a model, made once for all shares, and what a cache keeps with some of them."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.glue import scores as glue
from hf_synthesizer import Suggestion, SynthesizerConfig, patch_model, transfer_attention
from hf_synthesizer.transfer.head_gates import gated
from hf_synthesizer.transfer.observe import learners_of, observing, pair_layers
from hf_synthesizer.transfer.suggest import head_costs

MEASURED = 256
"""Training rows on which costs are measured."""


@dataclass(frozen=True)
class Whole:
    """A teacher's copy with all heads synthesized, in closed form, and the order in which heads can be."""

    model: PreTrainedModel
    suggestion: Suggestion

    @classmethod
    def of(cls, teacher: PreTrainedModel, variant: str, batches: Any) -> Whole:
        """What `suggest_heads` does, less its curve, and the model that it throws away."""
        model = copy.deepcopy(teacher)
        patch_model(model, variant, max_length=glue.MAX_LENGTH)
        transfer_attention(model, teacher, batches, method="average", autocast=torch.bfloat16)
        pairs = pair_layers(model, teacher)
        measured = [dict(batch) for batch in itertools.islice(batches, -(-MEASURED // glue.BATCH_SIZE))]
        for frozen in (teacher, model):
            frozen.requires_grad_(False)
        with observing(teacher, model), gated(pairs) as gates, torch.autocast("cpu", torch.bfloat16):
            costs = head_costs(teacher, gates, measured, {pair.label: pair.student.dimensions[1] for pair in pairs})
        teacher.requires_grad_(True)
        config = SynthesizerConfig(variant, max_length=glue.MAX_LENGTH)
        return cls(model, Suggestion.of_heads(config, dict(enumerate(costs.values())), 1.0))

    def save(self, path: Path) -> None:
        """Two files, for runs to come."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.suggestion.save(path.with_suffix(".json"))
        torch.save(self.model.state_dict(), path)

    @classmethod
    def load(cls, path: Path, teacher: PreTrainedModel, variant: str) -> Whole:
        """What `save` wrote."""
        model = patch_model(copy.deepcopy(teacher), variant, max_length=glue.MAX_LENGTH)
        model.load_state_dict(torch.load(path, weights_only=True))
        return cls(model, Suggestion.load(path.with_suffix(".json")))


def take_heads(model: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Give each synthesized head of a model what it has in a model that has all of them."""
    for pair in pair_layers(model, whole):
        theirs = pair.teacher.synthesizer
        state = theirs.state_dict()
        for learner in learners_of(pair):
            rows = list(learner.heads)
            learner.synthesizer.load_state_dict(
                {
                    name: tensor.unflatten(0, (theirs.num_heads, -1))[rows].flatten(0, 1)
                    for name, tensor in state.items()
                }
            )


def cache_share(plan: dict[Any, Any], teacher: PreTrainedModel) -> float:
    """What a decoder of the teacher's shape keeps of its tokens with this plan, relative to stock: it is the same for each token."""
    from transformers import BertLMHeadModel

    config = copy.deepcopy(teacher.config)
    config.is_decoder, config.vocab_size = True, 8
    kept = []
    for patched in (False, True):
        model = BertLMHeadModel(config).eval()
        if patched:
            patch_model(model, plan, max_length=16)
        with torch.no_grad():
            cache = model(torch.zeros(1, 4, dtype=torch.long), past_key_values=DynamicCache(), use_cache=True)
        layers = cache.past_key_values.layers
        kept.append(sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values)))
    return kept[1] / kept[0]


@torch.no_grad()
def zero_heads(projection: torch.nn.Linear, num_heads: int, heads: list[int]) -> None:
    """These heads of a layer give nothing: their columns of the output projection are zero."""
    projection.weight.unflatten(1, (num_heads, -1))[:, heads] = 0
