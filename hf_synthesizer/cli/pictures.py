"""`plot`: pictures as PNG or SVG, and an interactive page of attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import CommandError, Json, redirect_output, require_file
from .console import report as show
from .models import AutoClass, Model, Task, load, load_tokenizer
from .patching import numbers
from .variants import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP = """Draw attention, learned parameters and measurements. The ending of --output chooses PNG or SVG.

\b
Examples:
  hf-synthesizer plot attention taught --text "Not nearly as bad as the trailer." --teacher bert-base-uncased --output a.png
  hf-synthesizer plot page taught --text "Not nearly as bad as the trailer." --teacher bert-base-uncased --output a.html
  hf-synthesizer plot synthesizer taught --output learnt.svg
  hf-synthesizer plot suggestion plan.json --output plan.png
"""

plot = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option(help="The file to write.", dir_okay=False)]
Text = Annotated[list[str], typer.Option("--text", metavar="TEXT", help="A text for the model; repeat for several.")]
Teacher = Annotated[str | None, typer.Option(help="A stock model to compare with.")]
Heads = Annotated[str | None, typer.Option(help="The heads to draw, such as 0,3. Default: four of them.")]
Layers = Annotated[str | None, typer.Option(help="The layers to draw, such as 0,5. Default: some of them.")]
File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, exists=True)]


@plot.command()
def attention(
    model: Model,
    text: Text,
    output: Output,
    teacher: Teacher = None,
    layers: Layers = None,
    heads: Heads = None,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Draw the attention maps of heads for the first text. With a teacher, draw its maps and the difference too.

    \b
    Example:
      hf-synthesizer plot attention taught --text "A quiet film." --teacher bert-base-uncased --output a.png
    """
    _require_picture(output)
    with redirect_output():
        from ..plots import plot_attention

        drawn, stock, tokenizer = _load_models(model, teacher, task, auto_class)
        inputs = tokenizer(text[0], truncation=True, return_tensors="pt")
        figure = plot_attention(
            drawn, inputs, stock, tokenizer=tokenizer, layers=_indices(layers), heads=_indices(heads)
        )
    _save_figure(figure, output, json)


@plot.command()
def page(
    model: Model,
    text: Text,
    output: Output,
    teacher: Teacher = None,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Write an interactive HTML page of attention: choose text, layer and head, and point at a token. It needs no network.

    \b
    Example:
      hf-synthesizer plot page taught --text "A quiet film." --text "A loud one." --output a.html
    """
    require_file(output, ".html", ".htm")
    with redirect_output():
        from ..pictures import attention_page

        drawn, stock, tokenizer = _load_models(model, teacher, task, auto_class)
        written = attention_page(drawn, text, stock, tokenizer=tokenizer)
        output.write_text(written, encoding="utf-8")
    show({"output": str(output)}, f"written: {output}", json)


@plot.command()
def synthesizer(
    model: Model,
    output: Output,
    layers: Layers = None,
    heads: Heads = None,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Draw the learned parameters of the synthesized layers.

    \b
    Example:
      hf-synthesizer plot synthesizer taught --layers 0,5 --output learnt.svg
    """
    _require_picture(output)
    with redirect_output():
        from ..plots import plot_synthesizer

        figure = plot_synthesizer(load(model, task, auto_class), layers=_indices(layers), heads=_indices(heads))
    _save_figure(figure, output, json)


@plot.command()
def suggestion(file: File, output: Output, json: Json = False) -> None:
    """Draw the costs that `suggest --json` measured.

    \b
    Example:
      hf-synthesizer plot suggestion plan.json --output plan.png
    """
    with redirect_output():
        from ..plots import plot_suggestion

        figure = plot_suggestion(read_json(file))
    _save_figure(figure, output, json)


@plot.command()
def transfer(file: File, output: Output, json: Json = False) -> None:
    """Draw the report that `transfer --json` printed.

    \b
    Example:
      hf-synthesizer plot transfer transfer.json --output transfer.png
    """
    with redirect_output():
        from ..plots import plot_transfer

        figure = plot_transfer(read_json(file))
    _save_figure(figure, output, json)


@plot.command()
def training(file: File, output: Output, json: Json = False) -> None:
    """Draw losses and scores of a Trainer, from its trainer_state.json or from its output folder.

    \b
    Example:
      hf-synthesizer plot training tuned --output training.png
    """
    with redirect_output():
        from ..plots import plot_training

        figure = plot_training(file)
    _save_figure(figure, output, json)


@plot.command()
def benchmark(
    file: File,
    output: Output,
    memory: Annotated[bool, typer.Option("--memory", help="Draw peak memory instead of speed.")] = False,
    conditions: Annotated[
        str | None,
        typer.Option(help="The conditions to draw, such as inference-none-float32. Default: the first in the file."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw speed or memory over the length, from a CSV file of the repository's benchmarks.

    \b
    Example:
      hf-synthesizer plot benchmark benchmarks/results/attention.csv --conditions train-none-float32 --output speed.png
    """
    with redirect_output():
        import csv

        from ..pictures.lengths import MEMORY, SPEED, curves, in_words
        from ..plots import plot_lengths

        column, label = MEMORY if memory else SPEED
        with file.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        if not rows or column not in rows[0] or "variant" not in rows[0]:
            raise CommandError(f"{file} has no column {column!r} of a benchmark; try with or without --memory.")
        plots = dict(curves(rows, column))
        name = conditions or next(iter(plots), "")
        if name not in plots:
            raise CommandError(f"{file} has no plot {name!r}; it has {', '.join(plots) or 'none'}.")
        figure = plot_lengths(plots[name], label, in_words(name))
    _save_figure(figure, output, json)


def _load_models(model: str, teacher: str | None, task: str | None, auto_class: str | None) -> tuple[Any, Any, Any]:
    stock = None if teacher is None else load(teacher, task, auto_class)
    return load(model, task, auto_class), stock, load_tokenizer(model)


def _indices(text: str | None) -> list[int] | None:
    return None if text is None else numbers(text, "--layers or --heads", least=0)


def _require_picture(output: Path) -> None:
    from ..pictures.figures import FORMATS

    require_file(output, *FORMATS)


def _save_figure(figure: Figure, output: Path, json: bool) -> None:
    from ..plots import save

    _require_picture(output)
    save(figure, output)
    show({"output": str(output)}, f"written: {output}", json)
