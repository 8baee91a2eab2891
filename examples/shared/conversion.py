"""The flags of the conversion, as arguments of `patch_model` and `transfer_attention`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_synthesizer import suggest_heads, suggest_layers
from hf_synthesizer.checkpoints.fresh_heads import require_trained_head
from hf_synthesizer.errors import InvalidConfigError
from hf_synthesizer.patching.layer_text import parse_layers
from hf_synthesizer.transfer.variation import MEASURED_BATCHES

SUGGEST: dict[str, Any] = {"layers": suggest_layers, "heads": suggest_heads}
"""What `--layers suggest` measures, by what `--by` says."""

logger = logging.get_logger(__name__)


@dataclass
class ConversionArguments:
    """The flags of the conversion."""

    variant: str | None = field(
        default=None,
        metadata={"help": "A variant or a mixture, such as dense+salience. Without it the model stays stock."},
    )
    layers: str | None = field(
        default=None,
        metadata={"help": "Which layers, such as 0-3,5; all by default. 'suggest' measures, see --by and --budget."},
    )
    by: str = field(
        default="layers",
        metadata={"help": "With --layers suggest: choose whole layers, or heads, by the measured cost of a swap."},
    )
    budget: float | None = field(
        default=None,
        metadata={"help": "With --layers suggest: the share of the layers, or heads, to synthesize; 0.5 by default."},
    )
    mixing: str | None = field(default=None, metadata={"help": "How a mixture is weighted: softmax or sum."})
    transfer_steps: int = field(
        default=0, metadata={"help": "Steps in which the stock model teaches the new layers; 0 leaves them untrained."}
    )
    transfer_answers: int = field(
        default=0,
        metadata={"help": "More steps, on the answers of the teacher's head. For a teacher fine-tuned on the task."},
    )
    transfer_method: str = field(default="auto", metadata={"help": "auto, average or distill."})
    transfer_batch_size: int = field(default=32, metadata={"help": "Rows of a transfer step."})
    teacher: str | None = field(
        default=None,
        metadata={"help": "A (fine-tuned) stock model as teacher. Default: the model before the swap."},
    )

    def require_consistent(self) -> None:
        """Check that the flags fit together.

        Raises:
            InvalidConfigError: for flags that contradict each other, or a flag without another flag that it needs.
        """
        if self.variant is None:
            for name in ("layers", "budget", "mixing", "teacher", "transfer_steps", "transfer_answers"):
                if getattr(self, name):
                    raise InvalidConfigError(f"--{name} says how to swap attention, so it needs --variant.")
            return
        if self.transfer_method == "average" and (self.transfer_steps or self.transfer_answers):
            raise InvalidConfigError(
                "--transfer_method average is a closed form and takes no steps: leave --transfer_steps and --transfer_answers "
                "out, or take --transfer_method auto."
            )
        if self.by not in SUGGEST:
            raise InvalidConfigError(f"--by {self.by}: choose by {' or '.join(SUGGEST)}.")
        for said in [f"--by {self.by}"] * (self.by == "heads") + ["--budget"] * (self.budget is not None):
            if self.layers != "suggest":
                raise InvalidConfigError(f"{said} says how layers or heads are chosen, so it needs --layers suggest.")

    def require_weights(self, path: str) -> None:
        """Check that the teacher has trained weights.

        Raises:
            InvalidConfigError: for a transfer from a model that starts from scratch.
        """
        if not path and not self.teacher and (self.transfer_steps or self.transfer_answers):
            raise InvalidConfigError(
                "A model from scratch has nothing to teach: leave --transfer_steps out, or name a --teacher of the same shape."
            )

    @property
    def options(self) -> dict[str, Any]:
        """The other options of `SynthesizerConfig`."""
        return {} if self.mixing is None else {"mixing": self.mixing}

    def choose(
        self, stock: PreTrainedModel, batches: DataLoader, max_length: int, autocast: torch.dtype | None = None
    ) -> tuple[Any, Any]:
        """The arguments `variant` and `layers` of `patch_model`. With `--layers suggest`: a measured plan, and None.

        Raises:
            InvalidConfigError: for --transfer_answers with a teacher whose head was never trained.
        """
        if self.transfer_answers:
            require_trained_head(stock, "--transfer_answers learns what the teacher's head answers")
        if self.layers != "suggest":
            return self.variant, parse_layers(self.layers)
        budget = 0.5 if self.budget is None else self.budget
        suggestion = SUGGEST[self.by](
            stock, batches, self.variant, budget, autocast=autocast, max_length=max_length, **self.options
        )
        logger.warning(f"Suggested {self.by}:\n{suggestion}")
        return suggestion, None

    @property
    def transfers(self) -> bool:
        """Whether a transfer comes before the training."""
        return bool(self.transfer_steps or self.transfer_answers or self.transfer_method == "average")

    @property
    def stages(self) -> tuple[int, int, int]:
        """The steps of the three stages of `transfer_attention`."""
        return self.transfer_steps // 3, self.transfer_steps - self.transfer_steps // 3, self.transfer_answers

    @property
    def rows(self) -> int:
        """The number of rows for a suggestion and a transfer."""
        return max(self.transfer_steps + self.transfer_answers, MEASURED_BATCHES) * self.transfer_batch_size

    def batches(self, rows: Any, collate: Any, seed: int) -> DataLoader:
        """Shuffled batches of rows for a suggestion and a transfer."""
        order = torch.Generator().manual_seed(seed)
        return DataLoader(rows, self.transfer_batch_size, shuffle=True, generator=order, collate_fn=collate)
