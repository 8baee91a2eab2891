"""`plot`: pictures as PNG or SVG, and an interactive page of attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import CommandError, redirect_output, require_file, show
from .models import load, load_tokenizer
from .options import AutoClass, Json, Model, Task, numbers, read_json

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

    def draw(plots: Any) -> Figure:
        loaded, stock, tokenizer = _load_models(model, teacher, task, auto_class)
        inputs = tokenizer(text[0], truncation=True, return_tensors="pt")
        return plots.plot_attention(loaded, inputs, stock, tokenizer=tokenizer, **_indices(layers, heads))

    _save_figure(draw, output, json)


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

        loaded, stock, tokenizer = _load_models(model, teacher, task, auto_class)
        output.write_text(attention_page(loaded, text, stock, tokenizer=tokenizer), encoding="utf-8")
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
    shown = _indices(layers, heads)
    _save_figure(lambda plots: plots.plot_synthesizer(load(model, task, auto_class), **shown), output, json)


@plot.command()
def suggestion(file: File, output: Output, json: Json = False) -> None:
    """Draw the costs that `suggest --json` measured.

    \b
    Example:
      hf-synthesizer plot suggestion plan.json --output plan.png
    """
    _save_figure(lambda plots: plots.plot_suggestion(read_json(file)), output, json)


@plot.command()
def transfer(file: File, output: Output, json: Json = False) -> None:
    """Draw the report that `transfer --json` printed.

    \b
    Example:
      hf-synthesizer plot transfer transfer.json --output transfer.png
    """
    _save_figure(lambda plots: plots.plot_transfer(read_json(file)), output, json)


@plot.command()
def training(file: File, output: Output, json: Json = False) -> None:
    """Draw losses and scores of a Trainer, from its trainer_state.json or from its output folder.

    \b
    Example:
      hf-synthesizer plot training tuned --output training.png
    """
    _save_figure(lambda plots: plots.plot_training(file), output, json)


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

    def draw(plots: Any) -> Figure:
        import csv

        from ..pictures.lengths import MEMORY, SPEED, curves, describe_conditions

        column, label = MEMORY if memory else SPEED
        with file.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        if not rows or column not in rows[0] or "variant" not in rows[0]:
            raise CommandError(f"{file} has no column {column!r} of a benchmark; try with or without --memory.")
        lines_by_name = dict(curves(rows, column))
        name = conditions or next(iter(lines_by_name), "")
        if name not in lines_by_name:
            raise CommandError(f"{file} has no plot {name!r}; it has {', '.join(lines_by_name) or 'none'}.")
        return plots.plot_lengths(lines_by_name[name], label, describe_conditions(name))

    _save_figure(draw, output, json)


def _load_models(model: str, teacher: str | None, task: str | None, auto_class: str | None) -> tuple[Any, Any, Any]:
    stock = None if teacher is None else load(teacher, task, auto_class)
    return load(model, task, auto_class), stock, load_tokenizer(model)


def _indices(layers: str | None, heads: str | None) -> dict[str, list[int] | None]:
    """The keyword arguments of a plot that choose layers and heads."""
    texts = {"layers": layers, "heads": heads}
    return {name: None if text is None else numbers(text, f"--{name}", least=0) for name, text in texts.items()}


def _save_figure(draw: Callable[[Any], Figure], output: Path, json: bool) -> None:
    """Check the output, call `draw` with the module `hf_synthesizer.plots`, and save its figure."""
    with redirect_output():
        from .. import plots
        from ..pictures.figures import FORMATS

        require_file(output, *FORMATS)
        plots.save(draw(plots), output)
    show({"output": str(output)}, f"written: {output}", json)
