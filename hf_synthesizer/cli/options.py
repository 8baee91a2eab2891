"""The options that several commands share, and how their values are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import CommandError

if TYPE_CHECKING:
    from ..transfer import Suggestion

Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A name on the Hub or a folder.", show_default=False)]
Task = Annotated[
    str | None,
    typer.Option(
        help="The task of a pipeline, such as fill-mask, whose head to load. Default: the checkpoint's own head."
    ),
]
AutoClass = Annotated[
    str | None, typer.Option(help="The Auto class to load with, such as AutoModelForMaskedLM, instead of --task.")
]
Output = Annotated[Path, typer.Option(help="The folder to write.", file_okay=False)]
Variant = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VARIANT",
        help="A variant or a mixture, such as dense+salience. For a hybrid LAYER=VARIANT, repeated for each layer or stack.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(help="The layers to convert, such as 0-3,5 or encoder,decoder.0-1. Default: all.", metavar="LAYERS"),
]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="The longest sequence, in tokens. Default: the model's own maximum.")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="An option of the variant, such as rank=16; repeat for several."
    ),
]
Plan = Annotated[
    Path | None, typer.Option(help="A file that `suggest --json` wrote, instead of --variant.", dir_okay=False)
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows or texts per step.")]


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """`"128,512"` is `[128, 512]`; `BadParameter` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) >= least for part in parts):
        raise typer.BadParameter(f"{option} {text}: give numbers ≥ {least}, separated by commas, such as 4,16.")
    return [int(part) for part in parts]


def parse_budget(text: str) -> int | float | dict[str, Any]:
    """`"0.5"` is a share, `"3"` a number, `"cache=0.3@8192"` a share of a resource; `BadParameter` for anything else."""
    resource, equals, amount = text.rpartition("=")
    share, at, length = amount.partition("@")
    try:
        if equals:
            return {resource.strip(): float(share), **({"length": int(length)} if at else {})}
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"--budget {text}: give a share such as 0.5, a number such as 3, or a share of the cache or of the multiply-adds at a "
            f"length, such as cache=0.3@8192 or multiply_adds=0.5@2048."
        ) from None


def parse_kind(text: str) -> dict[str, Any]:
    """`"dot_product:window=64,sinks=2"` is `{"variant": "dot_product", "window": 64, "sinks": 2}`."""
    variant, colon, options = text.partition(":")
    parts = re.split(r",(?=\s*\w+=)", options) if colon else None  # a value may be a list: factors=[8,4]
    return {"variant": variant, **parse_options(parts, None, "--variant")}


def parse_variant(variants: list[str] | None, plan: Path | None) -> str | dict[int | str, Any]:
    """The variant or hybrid for `patch_model`. Unknown variants are refused here, before a model is loaded.

    Raises:
        BadParameter: for neither or both of --variant and --plan.
        UnknownVariantError, InvalidConfigError: for an unknown variant or a bad plan.
    """
    if (plan is None) == (not variants):
        raise typer.BadParameter("Name the new attention: either with --variant, or with --plan.")
    if plan is not None:
        return dict(read_plan(plan))
    from ..synthesizers.registry import split_variant

    hybrid: dict[int | str, Any] = {}
    for part in variants or ():
        layer, equals, name = part.rpartition("=")
        split_variant(name)
        if not equals and variants == [part]:
            return name
        if not equals:
            raise typer.BadParameter(
                f"--variant {part}: several variants make a hybrid, so each needs a layer, such as 0={part}."
            )
        hybrid[int(layer) if re.fullmatch("-?[0-9]{1,9}", layer) else layer] = name
    return hybrid


def parse_options(options: list[str] | None, max_length: int | None, flag: str = "--option") -> dict[str, Any]:
    """Keyword arguments for `patch_model`. A value is parsed as JSON (16, true, [32, 16]), or else is a string."""
    arguments: dict[str, Any] = {} if max_length is None else {"max_length": max_length}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals:
            raise typer.BadParameter(f"{flag} {option}: write it as NAME=VALUE, such as rank=16.")
        try:
            arguments[name] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


def read_plan(path: Path) -> Suggestion:
    """Read a file that `suggest --json` wrote. `CommandError` if it is no JSON, `InvalidConfigError` if it is no plan."""
    from ..transfer import Suggestion

    return Suggestion.from_dict(read_json(path))


def read_json(path: Path) -> Any:
    """Read a JSON file; `CommandError` if it cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is no JSON ({error}).") from error
