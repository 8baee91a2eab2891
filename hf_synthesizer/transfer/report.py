"""The report of a transfer, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTransfer:
    """One synthesized layer.

    `before` and `after` are the divergence KL(teacher ‖ student) of its attention weights on the teacher's hidden states, in
    nats. 0 is perfect.
    """

    label: str
    variant: str
    before: float
    after: float


@dataclass(frozen=True)
class TransferReport:
    """The divergence of each synthesized layer and the errors of the whole model, before and after. Prints as a table.

    `error_before` and `error_after` are the squared difference to the teacher's hidden states relative to their variance, the
    mean over layers, when the student runs on its own. `answers_before` and `answers_after` are the squared difference of
    the logits of the model's head, relative to the teacher's squares. They are None without stage 3.
    """

    layers: tuple[LayerTransfer, ...]
    error_before: float
    error_after: float
    steps: int
    seconds: float
    answers_before: float | None = None
    answers_after: float | None = None

    @property
    def worst(self) -> tuple[LayerTransfer, ...]:
        """The layers sorted by their divergence after the transfer, the largest first."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.after))

    def to_dict(self) -> dict:
        """A dict that `json.dumps` accepts."""
        return {**vars(self), "layers": [vars(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, data: dict) -> TransferReport:
        """The inverse of `to_dict`."""
        return cls(**{**data, "layers": tuple(LayerTransfer(**layer) for layer in data["layers"])})

    def __str__(self) -> str:
        rows = [("layer", "variant", "divergence before", "after")]
        rows += [(layer.label, layer.variant, f"{layer.before:.3f}", f"{layer.after:.3f}") for layer in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        worst = ", ".join(layer.label for layer in self.worst[: max(1, len(self.layers) // 4)])
        errors = [("hidden states, squared error relative to their variance", self.error_before, self.error_after)]
        if self.answers_before is not None and self.answers_after is not None:
            errors.append(
                ("answers, squared error relative to their squares", self.answers_before, self.answers_after)
            )
        return "\n".join(
            [
                lines[0].rstrip(),
                "-" * len(lines[0]),
                *(line.rstrip() for line in lines[1:]),
                *(f"{what}: {a:.3f} → {b:.3f}" for what, a, b in errors),
                f"loses most: {worst} (suggest_layers measures which layers to leave stock)",
                f"{self.steps} steps, {self.seconds:.0f} s",
            ]
        )
