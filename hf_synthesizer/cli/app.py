"""`hf-synthesizer` and `python -m hf_synthesizer`: the list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import SynthesizerError
from ..version import __version__
from . import console, glue, listing, machine, patching, pictures, teaching

HELP = """Synthesizer attention for Hugging Face models: convert, teach, measure, draw, push.

MODEL is a name on the Hub or a folder, of a stock model or a converted one.

\b
Examples:
  hf-synthesizer variants
  hf-synthesizer patch bert-base-uncased --variant dense+salience --output converted
  hf-synthesizer suggest bert-base-uncased --variant random --budget 0.5 --texts texts.txt --json > plan.json
  hf-synthesizer patch bert-base-uncased --plan plan.json --output converted
  hf-synthesizer transfer converted --texts texts.txt --output taught
  hf-synthesizer report taught --lengths 128,512
  hf-synthesizer push taught me/bert-synthesizer

The exit code is 0 on success, 1 with one message on an error, and 2 for wrong options. Reports go to stdout, as JSON with
--json. Everything else goes to stderr.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
for module in (listing, patching, teaching, glue, machine):
    for command in module.COMMANDS:
        app.command()(command)
app.add_typer(pictures.plot, name="plot")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command with these arguments, by default those of the process. Ends with `SystemExit`."""
    if not console.shows_progress():
        console.hide_progress_bars()
    try:
        app(arguments, prog_name="hf-synthesizer")
    except (SynthesizerError, OSError, ModuleNotFoundError) as error:
        console.fail(error)
