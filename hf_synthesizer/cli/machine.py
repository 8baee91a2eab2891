"""`bench` and `doctor`: how fast this machine is, and whether it computes what it should."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .console import CommandError, Json, working
from .console import report as show
from .models import Model, load_config
from .patching import numbers

LONGEST = 16384
"""Tokens that `bench` times: beyond it a table alone takes gigabytes."""


class Precision(StrEnum):
    """What `bench` computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def add_to(app: typer.Typer) -> None:
    """The commands of this file."""
    for command in (bench, doctor):
        app.command()(command)


def bench(
    model: Model,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="VARIANT", help="What to compare with stock; once for each. Default: six of them."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Lengths in tokens, with commas between.")] = "128,512",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.0, help="For everything, once it is built.")] = 40.0,
    training: Annotated[bool, typer.Option("--training", help="Time a forward and a backward.")] = False,
    device: Annotated[str, typer.Option(help="Where: cpu, cuda, mps, xpu.")] = "cpu",
    dtype: Annotated[Precision, typer.Option(help="Of weights and inputs.")] = Precision.FLOAT32,
    json: Json = False,
) -> None:
    """Time one attention layer of this model's size on this machine, stock beside synthesized, in about a minute.

    Weights are random: only the config of MODEL is read.

    \b
    Example:
      hf-synthesizer bench bert-base-uncased --variant random --variant dense+salience --lengths 128
    """
    chosen = numbers(lengths, "--lengths")
    with working():
        import torch

        from ..measuring.block import VARIANTS, bench_block
        from ..synthesizers.config import SynthesizerConfig

        for name in variant or ():
            SynthesizerConfig.create(name)
        if max(chosen) > LONGEST:
            raise CommandError(f"--lengths {lengths}: up to {LONGEST:,} tokens are timed.")
        if device != "cpu" and not (hasattr(torch, device) and getattr(torch, device).is_available()):
            raise CommandError(f"--device {device}: this torch ({torch.__version__}) finds no such device here.")
        found = bench_block(
            load_config(model),
            variant or VARIANTS,
            chosen,
            batch_size=batch_size,
            seconds=seconds,
            training=training,
            device=device,
            dtype=getattr(torch, dtype),
        )
    show(found.to_dict(), str(found), json)


def doctor(json: Json = False) -> None:
    """Say what this machine has, what is slow or missing on it, and compare every route with the reference.

    Leaves with 1 if some route computes something else.

    \b
    Example:
      hf-synthesizer doctor
    """
    with working():
        from ..measuring.doctor import examine

        found = examine()
    show(found.to_dict(), str(found), json)
    if not found.passed:
        raise typer.Exit(1)
