"""`bench` and `doctor`: measure the speed of this machine, and check its results."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .console import CommandError, redirect_output, show
from .models import load_config
from .options import BatchSize, Json, Model, numbers

LONGEST = 16384
"""The longest sequence that `bench` times. Beyond it, a table takes gigabytes."""


class Precision(StrEnum):
    """The dtypes of `bench`."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def bench(
    model: Model,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VARIANT", help="A variant to compare with stock; repeat for several. Default: six variants."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Lengths in tokens, separated by commas.")] = "128,512",
    batch_size: BatchSize = 8,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="The time for all measurements, without building the layers.")
    ] = 40.0,
    training: Annotated[bool, typer.Option("--training", help="Time a forward and a backward pass.")] = False,
    device: Annotated[str, typer.Option(help="The device: cpu, cuda, mps or xpu.")] = "cpu",
    dtype: Annotated[Precision, typer.Option(help="The dtype of weights and inputs.")] = Precision.FLOAT32,
    json: Json = False,
) -> None:
    """Time one attention layer of this model's size on this machine, stock beside synthesized, in about a minute.

    Weights are random: only the config of MODEL is read.

    \b
    Example:
      hf-synthesizer bench bert-base-uncased --variant random --variant dense+salience --lengths 128
    """
    chosen = numbers(lengths, "--lengths")
    with redirect_output():
        import torch

        from ..measuring.block import VARIANTS, bench_block
        from ..synthesizers.config import SynthesizerConfig

        for name in variant or ():
            SynthesizerConfig(name)
        if max(chosen) > LONGEST:
            raise CommandError(f"--lengths {lengths}: at most {LONGEST:,} tokens can be timed.")
        if device != "cpu" and not (hasattr(torch, device) and getattr(torch, device).is_available()):
            raise CommandError(f"--device {device}: this torch ({torch.__version__}) finds no such device.")
        timings = bench_block(
            load_config(model),
            variant or VARIANTS,
            chosen,
            batch_size=batch_size,
            seconds=seconds,
            training=training,
            device=device,
            dtype=getattr(torch, dtype),
        )
    show(timings.to_dict(), str(timings), json)


def doctor(json: Json = False) -> None:
    """Report the features of this machine, name what is slow or missing, and compare each route with the reference.

    Exits with 1 if the results of a route differ.

    \b
    Example:
      hf-synthesizer doctor
    """
    with redirect_output():
        from ..measuring.doctor import examine

        examination = examine()
    show(examination.to_dict(), str(examination), json)
    if not examination.passed:
        raise typer.Exit(1)


COMMANDS = (bench, doctor)
