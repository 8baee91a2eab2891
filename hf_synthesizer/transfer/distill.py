"""The losses of distillation: each layer's weights, then every layer's output, then what the head says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..errors import InvalidConfigError
from ..layers.sentence_transformers import model_in, model_of_sentences
from ..synthesizers import Synthesizer
from .observe import Batch, Call, LayerPair, observe_calls, on_device, synthesized_weights


def divergence(call: Call, weights: torch.Tensor) -> torch.Tensor:
    """`KL(teacher ‖ student)` of attention weights, the mean over heads and over the rows of tokens (a scalar)."""
    return divergences(call, weights).mean()


def divergences(call: Call, weights: torch.Tensor) -> torch.Tensor:
    """`KL(teacher ‖ student)` of each head's attention weights, the mean over the rows of tokens, (H)."""
    target = call.weights.float()
    rows = call.rows.unsqueeze(1)  # (B, 1, L)
    tiny = torch.finfo(torch.float32).tiny
    terms = target * (target.clamp(min=tiny).log() - weights.float().to(target.device).clamp(min=tiny).log())
    return (terms.sum(-1) * rows).sum((0, 2)) / rows.sum().clamp(min=1)


def weight_losses(
    teacher: PreTrainedModel, pairs: list[LayerPair], batch: Batch
) -> Iterable[tuple[LayerPair, torch.Tensor]]:
    """Stage 1: the divergence of each layer, when it sees the teacher's hidden states. Both run under eager."""
    calls = observe_calls(teacher, pairs, batch)
    for pair in pairs:
        found = calls.pop(pair.label)
        yield pair, torch.stack([divergence(call, synthesized_weights(pair.student, call)) for call in found]).mean()


def output_losses(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> list[torch.Tensor]:
    """Stage 2: for each layer's output on the student's own hidden states, `|student − teacher|² / variance(teacher)`,
    over tokens. What a head says is left to stage 3: beside the layers it was measured to do harm.
    """
    with torch.no_grad():
        wanted = teacher(**on_device(batch, teacher), output_hidden_states=True)
    found = model(**on_device(batch, model), output_hidden_states=True)
    return [
        relative_error(student, target.to(student.device), keep)
        for (students, keep), (targets, _) in zip(states_of(found, batch), states_of(wanted, batch), strict=True)
        for student, target in zip(students, targets, strict=True)
        if student.requires_grad or not torch.is_grad_enabled()
    ]


def answer_loss(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Stage 3: `|student − teacher|² / |teacher|²` of the logits, (B, C) or (B, L, C), over rows or tokens. What is added to
    all classes alike says nothing, so logits of several classes have their mean taken off. Of two SentenceTransformers it is
    that of their embeddings.

    Raises:
        InvalidConfigError: where a model has no head that gives logits, or the two heads differ.
    """
    if model_of_sentences(model) is not None and model_of_sentences(teacher) is not None:
        with torch.no_grad():
            wanted = _embeddings(teacher, batch)
        found = _embeddings(model, batch)
        return (found - wanted.to(found)).square().sum() / wanted.square().sum().clamp(
            min=torch.finfo(found.dtype).eps
        )
    model, teacher = model_in(model), model_in(teacher)
    with torch.no_grad():
        wanted = teacher(**on_device(batch, teacher)).get("logits")
    found = model(**on_device(batch, model)).get("logits")
    if wanted is None or found is None or wanted.shape != found.shape:
        raise InvalidConfigError(
            f"Stage 3 of a transfer learns what the teacher's head says, but {_head(model, found)} and "
            f"{_head(teacher, wanted)}. Give steps=(stage 1, stage 2), or a teacher with the model's own head."
        )
    found, wanted = _said(found, batch), _said(wanted.to(found.device), batch)
    square = wanted.square().sum()
    return (found - wanted).square().sum() / square.clamp(min=torch.finfo(square.dtype).eps)


def answers_of(model: PreTrainedModel, batch: Batch, head: bool = True) -> torch.Tensor:
    """What a model says of a batch, (B, …): the logits of its head, or, without one, the last hidden states less their mean.
    0 where there is padding. `head=False` leaves the logits aside. What a SentenceTransformer says are its embeddings."""
    if head and model_of_sentences(model) is not None:
        return _embeddings(model, batch)
    model = model_in(model)
    output = model(**on_device(batch, model), **({} if head else {"output_hidden_states": True}))
    logits = [
        output[name] for name in ("logits", "start_logits", "end_logits") if head and output.get(name) is not None
    ]
    if logits:
        return torch.cat([_said(part, batch) for part in logits], dim=-1)
    states = (output[0] if head else states_of(output, batch)[0][0][-1]).float()
    keep = _tokens(states, batch)
    mean = (states * keep).sum((0, 1)) / keep.expand_as(states[..., :1]).sum().clamp(min=1)
    return (states - mean) * keep


def _embeddings(sentences: Any, batch: Batch) -> torch.Tensor:
    """The embeddings (B, d) of a SentenceTransformer."""
    return sentences(on_device(batch, model_in(sentences)))["sentence_embedding"].float()


def _said(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Logits (B, C) or (B, L, C) less what all classes have alike, and 0 where there is padding."""
    logits = logits.float()
    if logits.shape[-1] > 1:
        logits = logits - logits.mean(-1, keepdim=True)
    return logits * _tokens(logits, batch)


def _tokens(answers: torch.Tensor, batch: Batch) -> torch.Tensor:
    """1 where answers (B, L, C) are those of tokens, and 0 elsewhere, (B, L, 1); or 1 for all."""
    masks = [keep for keep in tokens_of(batch) if keep is not None and keep.shape == answers.shape[:-1]]
    return masks[-1].to(answers).unsqueeze(-1) if masks else answers.new_ones(())


def _head(model: PreTrainedModel, logits: torch.Tensor | None) -> str:
    says = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
    return f"{type(model).__name__} gives {says}"


def relative_error(student: torch.Tensor, target: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """`Σ |student − target|² / Σ |target − mean|²` over the tokens of (B, L, d); `keep` (B, L) says which are tokens.

    It says so of text: states of patches and frames have other shapes, and all of them count.
    """
    student, target = (states.float().flatten(1, -2) for states in (student, target))
    fits = keep is not None and keep.shape == target.shape[:2]
    keep = keep.to(target) if keep is not None and fits else target.new_ones(target.shape[:2])
    keep = keep.unsqueeze(-1)
    mean = (target * keep).sum((0, 1)) / keep.sum().clamp(min=1)
    variance = ((target - mean).square() * keep).sum()
    return ((student - target).square() * keep).sum() / variance.clamp(min=torch.finfo(torch.float32).eps)


def tokens_of(batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which places of the input, and of a decoder behind an encoder, are tokens; None where the batch does not say."""
    tokens = batch.get("attention_mask")
    tokens = tokens.flatten(0, -2) if isinstance(tokens, torch.Tensor) else None  # multiple choice has (B, C, L)
    targets = batch.get("decoder_attention_mask")
    if targets is None and isinstance(batch.get("labels"), torch.Tensor) and batch["labels"].dim() == 2:
        targets = batch["labels"] != -100
    return tokens, targets


def states_of(output: ModelOutput, batch: Batch) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]:
    """The recorded hidden states of each stack of a model, its towers included, and which of their places are tokens.

    Raises:
        InvalidConfigError: for a model that records none.
    """
    found = _recorded(output, *tokens_of(batch))
    if not found:
        raise InvalidConfigError(
            f"A transfer compares hidden states, and this model's {type(output).__name__} has none. Hand over the part of the "
            f"model that records them, such as model.vision_model and teacher.vision_model."
        )
    return found


def _recorded(
    output: ModelOutput, tokens: torch.Tensor | None, targets: torch.Tensor | None
) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]:
    found = []
    for name, value in output.items():
        if isinstance(value, ModelOutput):
            found += _recorded(value, tokens, targets)
        elif name.endswith("hidden_states") and isinstance(value, tuple) and value:
            found.append((value, targets if name.startswith("decoder") else tokens))
    return found


def fresh_parameters(synthesizers: Iterable[Synthesizer]) -> list[nn.Parameter]:
    """The parameters that no pretrained model has: all but what was the stock layer's own."""
    return [
        parameter
        for synthesizer in synthesizers
        for module in synthesizer.modules()
        if not _inherited(synthesizer, module)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    ]


def _inherited(synthesizer: Synthesizer, module: nn.Module) -> bool:
    return any(
        module in part.modules() for part in synthesizer.modules() if isinstance(part, Synthesizer) and part.is_stock
    )


def old_parameters(model: PreTrainedModel, fresh: list[nn.Parameter]) -> list[nn.Parameter]:
    """Everything else that trains, but the embeddings of tokens: those are the ground that both models stand on."""
    left_out = {id(parameter) for parameter in fresh}
    left_out |= {id(parameter) for parameter in _input_embeddings(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in left_out]


def _input_embeddings(model: PreTrainedModel) -> list[nn.Parameter]:
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # how Transformers says that there are none: sound and several towers
        return []
    return list(embeddings.parameters()) if isinstance(embeddings, nn.Module) else []
