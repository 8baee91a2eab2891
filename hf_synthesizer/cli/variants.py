"""The options of a conversion: --variant, --layers, --max-length, --option, --plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import CommandError

if TYPE_CHECKING:
    from ..transfer import Suggestion

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


def spec_of(variant: list[str] | None, plan: Path | None) -> str | dict[int | str, Any]:
    """The variant or hybrid for `patch_model`. Unknown variants are refused here, before a model is loaded.

    Raises:
        BadParameter: for neither or both of --variant and --plan.
        UnknownVariantError, InvalidConfigError: for an unknown variant or a bad plan.
    """
    if (plan is None) == (not variant):
        raise typer.BadParameter("Name the new attention: either with --variant, or with --plan.")
    if plan is not None:
        return dict(read_plan(plan))
    from ..synthesizers.registry import split_variant

    variants = variant or []
    for part in variants:
        split_variant(part.rpartition("=")[2])
    if len(variants) == 1 and "=" not in variants[0]:
        return variants[0]
    hybrid: dict[int | str, Any] = {}
    for part in variants:
        layer, equals, name = part.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"--variant {part}: several variants make a hybrid, so each needs a layer, such as 0={part}."
            )
        hybrid[int(layer) if re.fullmatch("-?[0-9]{1,9}", layer) else layer] = name
    return hybrid


def read_plan(path: Path) -> Suggestion:
    """Read a file that `suggest --json` wrote.

    Raises:
        CommandError: for a file that is no JSON.
        InvalidConfigError: for JSON that is no plan.
    """
    from ..transfer import Suggestion

    return Suggestion.from_dict(read_json(path))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CommandError: for a file that cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is no JSON ({error}).") from error


def options_of(options: list[str] | None, max_length: int | None) -> dict[str, Any]:
    """Keyword arguments for `patch_model`. A value is parsed as JSON (16, true, [32, 16]), or else is a string.

    Raises:
        BadParameter: for an option without a value.
    """
    arguments: dict[str, Any] = {} if max_length is None else {"max_length": max_length}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {option}: write it as NAME=VALUE, such as rank=16.")
        try:
            arguments[name] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments
