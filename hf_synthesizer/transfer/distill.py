"""The losses of distillation: attention weights of each layer, outputs of each layer, logits of the model's head."""

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
    """`KL(teacher ‖ student)` of attention weights: the mean over heads and over the queries that are tokens (a scalar)."""
    return divergences(call, weights).mean()


def divergences(call: Call, weights: torch.Tensor) -> torch.Tensor:
    """`KL(teacher ‖ student)` of each head's attention weights: the mean over the queries that are tokens, (H)."""
    target = call.weights.float()
    rows = call.rows.unsqueeze(1)  # (B, 1, L)
    tiny = torch.finfo(torch.float32).tiny
    terms = target * (target.clamp(min=tiny).log() - weights.float().to(target.device).clamp(min=tiny).log())
    return (terms.sum(-1) * rows).sum((0, 2)) / rows.sum().clamp(min=1)


def weight_losses(
    teacher: PreTrainedModel, pairs: list[LayerPair], batch: Batch
) -> Iterable[tuple[LayerPair, torch.Tensor]]:
    """Stage 1: the divergence of each layer on the teacher's hidden states. Both models must use the eager backend."""
    calls = observe_calls(teacher, pairs, batch)
    for pair in pairs:
        # No local variable for the divergences: it would keep this layer's graph alive while the next one runs.
        yield (
            pair,
            torch.stack(
                [divergence(call, synthesized_weights(pair.student, call)) for call in calls.pop(pair.label)]
            ).mean(),
        )


def output_losses(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> list[torch.Tensor]:
    """Stage 2: for each layer's output on the student's own hidden states, `|student − teacher|² / variance(teacher)`,
    over tokens. The logits of the model's head belong to stage 3: in measurements, adding them here did harm.
    """
    with torch.no_grad():
        target_output = teacher(**on_device(batch, teacher), output_hidden_states=True)
    output = model(**on_device(batch, model), output_hidden_states=True)
    return [
        relative_error(student, target.to(student.device), keep)
        for (students, keep), (targets, _) in zip(
            states_of(output, batch), states_of(target_output, batch), strict=True
        )
        for student, target in zip(students, targets, strict=True)
        if student.requires_grad or not torch.is_grad_enabled()
    ]


def answer_loss(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Stage 3: `|student − teacher|² / |teacher|²` of the logits, (B, C) or (B, L, C), over rows or tokens. Logits
    of several classes are compared without their mean over the classes, because softmax ignores it. For two
    SentenceTransformers, it is the loss of their embeddings.

    Raises:
        InvalidConfigError: if a model has no head with logits, or the logits differ in shape.
    """
    if model_of_sentences(model) is not None and model_of_sentences(teacher) is not None:
        with torch.no_grad():
            target = _embeddings(teacher, batch)
        answer = _embeddings(model, batch)
        return (answer - target.to(answer)).square().sum() / target.square().sum().clamp(
            min=torch.finfo(answer.dtype).eps
        )
    model, teacher = model_in(model), model_in(teacher)
    with torch.no_grad():
        target = teacher(**on_device(batch, teacher)).get("logits")
    answer = model(**on_device(batch, model)).get("logits")
    if target is None or answer is None or target.shape != answer.shape:
        raise InvalidConfigError(
            f"Stage 3 of a transfer learns the logits of the teacher's head, but {_describe_logits(model, answer)} and "
            f"{_describe_logits(teacher, target)}. Give steps=(stage 1, stage 2), or a teacher with the same head as the model."
        )
    answer, target = _centred_logits(answer, batch), _centred_logits(target.to(answer.device), batch)
    square = target.square().sum()
    return (answer - target).square().sum() / square.clamp(min=torch.finfo(square.dtype).eps)


def answers_of(model: PreTrainedModel, batch: Batch, head: bool = True) -> torch.Tensor:
    """The answers of a model for a batch, (B, …), with 0 at padding.

    They are the logits of its head. Without a head, or with `head=False`, they are the last hidden states minus their mean. The
    answers of a SentenceTransformer are its embeddings.
    """
    if head and model_of_sentences(model) is not None:
        return _embeddings(model, batch)
    model = model_in(model)
    output = model(**on_device(batch, model), **({} if head else {"output_hidden_states": True}))
    logits = [
        output[name] for name in ("logits", "start_logits", "end_logits") if head and output.get(name) is not None
    ]
    if logits:
        return torch.cat([_centred_logits(part, batch) for part in logits], dim=-1)
    states = (output[0] if head else states_of(output, batch)[0][0][-1]).float()
    keep = _token_mask(states, batch)
    mean = (states * keep).sum((0, 1)) / keep.expand_as(states[..., :1]).sum().clamp(min=1)
    return (states - mean) * keep


def _embeddings(sentences: Any, batch: Batch) -> torch.Tensor:
    """The embeddings (B, d) of a SentenceTransformer."""
    return sentences(on_device(batch, model_in(sentences)))["sentence_embedding"].float()


def _centred_logits(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Logits (B, C) or (B, L, C) minus their mean over the classes, and 0 at padding."""
    logits = logits.float()
    if logits.shape[-1] > 1:
        logits = logits - logits.mean(-1, keepdim=True)
    return logits * _token_mask(logits, batch)


def _token_mask(answers: torch.Tensor, batch: Batch) -> torch.Tensor:
    """1 at tokens and 0 at padding, (B, L, 1), for answers (B, L, C). A scalar 1 for other shapes."""
    masks = [keep for keep in tokens_of(batch) if keep is not None and keep.shape == answers.shape[:-1]]
    return masks[-1].to(answers).unsqueeze(-1) if masks else answers.new_ones(())


def _describe_logits(model: PreTrainedModel, logits: torch.Tensor | None) -> str:
    logits_or_none = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
    return f"{type(model).__name__} gives {logits_or_none}"


def relative_error(student: torch.Tensor, target: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """`Σ |student − target|² / Σ |target − mean|²` over the tokens of (B, L, d); `keep` (B, L) says which are tokens.

    If `keep` has another shape, all states count: those of image patches and audio frames.
    """
    student, target = (states.float().flatten(1, -2) for states in (student, target))
    fits = keep is not None and keep.shape == target.shape[:2]
    keep = keep.to(target) if keep is not None and fits else target.new_ones(target.shape[:2])
    keep = keep.unsqueeze(-1)
    mean = (target * keep).sum((0, 1)) / keep.sum().clamp(min=1)
    variance = ((target - mean).square() * keep).sum()
    return ((student - target).square() * keep).sum() / variance.clamp(min=torch.finfo(torch.float32).eps)


def tokens_of(batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The token masks of the input and of the decoder (in an encoder-decoder). None if the batch has no mask."""
    tokens = batch.get("attention_mask")
    tokens = tokens.flatten(0, -2) if isinstance(tokens, torch.Tensor) else None  # multiple choice has (B, C, L)
    targets = batch.get("decoder_attention_mask")
    if targets is None and isinstance(batch.get("labels"), torch.Tensor) and batch["labels"].dim() == 2:
        targets = batch["labels"] != -100
    return tokens, targets


def states_of(output: ModelOutput, batch: Batch) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]:
    """The recorded hidden states of each stack of a model, towers included, each with its token mask.

    Raises:
        InvalidConfigError: for a model that records no hidden states.
    """
    recorded = _recorded_states(output, *tokens_of(batch))
    if not recorded:
        raise InvalidConfigError(
            f"A transfer compares hidden states, and this model's {type(output).__name__} has none. Hand over the part of the "
            f"model that records them, such as model.vision_model and teacher.vision_model."
        )
    return recorded


def _recorded_states(
    output: ModelOutput, tokens: torch.Tensor | None, targets: torch.Tensor | None
) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]:
    recorded = []
    for name, value in output.items():
        if isinstance(value, ModelOutput):
            recorded += _recorded_states(value, tokens, targets)
        elif name.endswith("hidden_states") and isinstance(value, tuple) and value:
            recorded.append((value, targets if name.startswith("decoder") else tokens))
    return recorded


def fresh_parameters(synthesizers: Iterable[Synthesizer]) -> list[nn.Parameter]:
    """The parameters of synthesizers that did not come from the stock layer."""
    return [
        parameter
        for synthesizer in synthesizers
        for module in synthesizer.modules()
        if not _is_stock_module(synthesizer, module)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    ]


def _is_stock_module(synthesizer: Synthesizer, module: nn.Module) -> bool:
    return any(
        module in part.modules() for part in synthesizer.modules() if isinstance(part, Synthesizer) and part.is_stock
    )


def pretrained_parameters(model: PreTrainedModel, fresh: list[nn.Parameter]) -> list[nn.Parameter]:
    """All other trained parameters but the token embeddings: model and teacher share these."""
    excluded = {id(parameter) for parameter in fresh}
    excluded |= {id(parameter) for parameter in _input_embeddings(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in excluded]


def _input_embeddings(model: PreTrainedModel) -> list[nn.Parameter]:
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # Transformers raises this for audio models and for several towers
        return []
    return list(embeddings.parameters()) if isinstance(embeddings, nn.Module) else []
