"""From a stock model to a synthesized one, as the flags of the examples say."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.fresh_heads import fresh_weights
from ..errors import InvalidConfigError
from ..patching.plan import parse_layers
from ..patching.report import patch_report
from ..patching.swap import patch_model
from ..transfer import suggest_heads, suggest_layers, transfer_attention

AVERAGE_BATCHES = 100
"""How many batches a transfer's closed form and `suggest_layers` look at, at most."""

SUGGEST: dict[str, Any] = {"layers": suggest_layers, "heads": suggest_heads}
"""What `--layers suggest` measures, by what `--by` says."""

logger = logging.get_logger(__name__)


@dataclass
class ConversionArguments:
    """What becomes of the model's self-attention."""

    variant: str | None = field(
        default=None,
        metadata={"help": "A variant or a mixture, such as dense+salience; without it the model stays as it is."},
    )
    layers: str | None = field(
        default=None,
        metadata={"help": "Which layers, such as 0-3,5; all by default. 'suggest' measures, see --by and --budget."},
    )
    by: str = field(
        default="layers",
        metadata={"help": "With --layers suggest: choose whole layers, or heads, by what their swap costs."},
    )
    budget: float | None = field(
        default=None,
        metadata={"help": "With --layers suggest: the share of the layers, or heads, to synthesize; 0.5 by default."},
    )
    mixing: str | None = field(default=None, metadata={"help": "How a mixture is weighted: softmax or sum."})
    transfer_steps: int = field(
        default=0, metadata={"help": "Steps in which the stock model teaches the new layers; 0 starts them fresh."}
    )
    transfer_answers: int = field(
        default=0,
        metadata={"help": "Steps after those on what the teacher's head says. For a teacher fine-tuned on the task."},
    )
    transfer_method: str = field(default="auto", metadata={"help": "auto, average or distill."})
    transfer_batch_size: int = field(default=32, metadata={"help": "Rows of a transfer step."})
    teacher: str | None = field(
        default=None,
        metadata={"help": "A (fine-tuned) stock model that teaches instead of the model itself before the swap."},
    )


def require_weights(path: str, arguments: ConversionArguments) -> None:
    """Whether whoever teaches has learned something.

    Raises:
        InvalidConfigError: for a transfer from a model that starts from scratch.
    """
    if not path and not arguments.teacher and (arguments.transfer_steps or arguments.transfer_answers):
        raise InvalidConfigError(
            "A model from scratch has nothing to teach: leave --transfer_steps out, or name a --teacher of the same shape."
        )


def require_trained_head(model: PreTrainedModel, why: str) -> None:
    """Whether all weights of a model come from its checkpoint, its head's too.

    Raises:
        InvalidConfigError: where some were drawn at random when it was loaded.
    """
    drawn = fresh_weights(model)
    if drawn:
        raise InvalidConfigError(
            f"{why}, but the checkpoint of this {type(model).__name__} has no weights for {', '.join(drawn[:3])}"
            f"{'…' * (len(drawn) > 3)}: name a model that was fine-tuned on the task."
        )


def convert(
    model: PreTrainedModel,
    arguments: ConversionArguments,
    *,
    max_length: int,
    dataloader: Iterable[dict[str, Any]],
    teacher: PreTrainedModel | None = None,
    autocast: torch.dtype | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
) -> PreTrainedModel:
    """Patch the model in place, teach it, log what was done, and return it; without a variant nothing happens.

    Args:
        model: a stock model.
        arguments: see there.
        max_length: the number of positions.
        dataloader: text for the transfer, as batches of inputs.
        teacher: who teaches; a copy of the model before the swap if None.
        autocast: for instance `torch.bfloat16`.
        checkpoint_dir: where the transfer keeps its state, so that it can go on.
    """
    if arguments.variant is None:
        for name in ("layers", "budget", "mixing", "teacher", "transfer_steps", "transfer_answers"):
            if getattr(arguments, name):
                raise InvalidConfigError(f"--{name} says how to swap attention, so it needs --variant.")
        return model
    steps, answers = arguments.transfer_steps, arguments.transfer_answers
    if arguments.transfer_method == "average" and (steps or answers):
        raise InvalidConfigError(
            "--transfer_method average is a closed form and takes no steps: leave --transfer_steps and --transfer_answers "
            "out, or take --transfer_method auto."
        )
    if arguments.by not in SUGGEST:
        raise InvalidConfigError(f"--by {arguments.by}: choose by {' or '.join(SUGGEST)}.")
    for said in [f"--by {arguments.by}"] * (arguments.by == "heads") + ["--budget"] * (arguments.budget is not None):
        if arguments.layers != "suggest":
            raise InvalidConfigError(f"{said} says how layers or heads are chosen, so it needs --layers suggest.")
    options: dict[str, Any] = {} if arguments.mixing is None else {"mixing": arguments.mixing}
    stock = copy.deepcopy(model) if teacher is None else teacher
    if answers:
        require_trained_head(stock, "--transfer_answers learns what the teacher's head answers")
    if arguments.layers == "suggest":
        suggest = SUGGEST[arguments.by]
        budget = 0.5 if arguments.budget is None else arguments.budget
        hybrid = suggest(
            stock, dataloader, arguments.variant, budget, autocast=autocast, max_length=max_length, **options
        )
        logger.warning(f"Suggested {arguments.by}:\n{hybrid}")
        patch_model(model, hybrid, max_length=max_length, **options)
    else:
        patch_model(model, arguments.variant, layers=parse_layers(arguments.layers), max_length=max_length, **options)
    logger.warning(f"{patch_report(model)}")
    if steps or answers or arguments.transfer_method == "average":
        report = transfer_attention(
            model,
            stock,
            dataloader,
            method=arguments.transfer_method,
            steps=(steps // 3, steps - steps // 3, answers),
            autocast=autocast,
            checkpoint_dir=checkpoint_dir,
        )
        logger.warning(f"Transfer:\n{report}")
    return model
