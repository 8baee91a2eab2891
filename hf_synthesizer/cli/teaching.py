"""`suggest` and `transfer`: which layers or heads to synthesize, and teaching them what stock attention does."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import CommandError, Json, require_folder, watched, working
from .console import report as show
from .models import AutoClass, Model, Task, base_of, load, load_tokenizer
from .patching import Output, save
from .sentences import load_sentences
from .variants import MaxLength, Options, options_of

Texts = Annotated[
    Path, typer.Option(help="A file with a text a line, or a .jsonl file; no labels.", exists=True, dir_okay=False)
]
Column = Annotated[str, typer.Option(help="Where a .jsonl file has its texts.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts of a step.")]
Seed = Annotated[int, typer.Option(help="Of the order of the texts.")]


class By(StrEnum):
    """What `suggest` chooses among."""

    LAYERS = "layers"
    HEADS = "heads"


def add_to(app: typer.Typer) -> None:
    """The commands of this file."""
    for command in (suggest, transfer):
        app.command()(command)


def suggest(
    model: Model,
    variant: Annotated[str, typer.Option(help="What the chosen layers or heads get.")],
    texts: Texts,
    by: Annotated[By, typer.Option(help="Choose among whole layers, or among the heads of all layers.")] = By.LAYERS,
    budget: Annotated[
        str | None,
        typer.Option(
            help="A share, such as 0.5, or a number, such as 3; of heads also several with commas between, of which the "
            "last is the plan's. Default: 0.5 of the layers, 0.9 of the heads."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps in which the logits learn before they are judged. Default: 150; none for heads "
            "of a variant with a closed form.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches that swaps are measured on.")] = 8,
    batch_size: BatchSize = 32,
    max_length: MaxLength = None,
    option: Options = None,
    column: Column = "text",
    seed: Seed = 0,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Measure what each layer or head loses, and suggest which to synthesize; the JSON is what `patch --plan` takes.

    Heads are judged by what the model answers: name one that was fine-tuned on its task.

    \b
    Examples:
      hf-synthesizer suggest bert-base-uncased --variant random --budget 0.5 --texts texts.txt --json > plan.json
      hf-synthesizer suggest tuned --by heads --variant random+salience --budget 0.5,0.9 --texts texts.txt --json > plan.json
    """
    budgets = [] if budget is None else [budget_of(part) for part in budget.split(",")]
    if by is By.LAYERS and len(budgets) > 1:
        raise typer.BadParameter(f"--budget {budget}: several budgets are for --by heads; give one share or number.")
    options = options_of(option, max_length)
    with working():
        from ..layers.sentence_transformers import model_in
        from ..synthesizers.config import SynthesizerConfig
        from ..transfer import suggest_heads, suggest_layers
        from ..transfer.texts import read_texts, text_batches

        rows, tokenizer = read_texts(texts, column), load_tokenizer(model)
        teacher = None if task or auto_class or by is By.LAYERS else load_sentences(model)
        teacher = load(model, task, auto_class) if teacher is None else teacher
        loader = text_batches(
            rows, tokenizer, model_in(teacher), batch_size=batch_size, max_length=max_length, seed=seed
        )
        config = SynthesizerConfig.create(variant, **options)  # the plan then says all that patch has to know
        wanted: dict[str, Any] = {} if steps is None else {"steps": steps}
        wanted |= {"batches": batches, "progress": watched(), "max_length": config.max_length}
        found = (
            suggest_heads(teacher, loader, config, budgets or 0.9, **wanted)
            if by is By.HEADS
            else suggest_layers(teacher, loader, config, budgets[0] if budgets else 0.5, **wanted)
        )
    show(found.to_dict(), str(found), json)


def budget_of(text: str) -> int | float:
    """`"0.5"` is a share, `"3"` a number.

    Raises:
        BadParameter: for anything else.
    """
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise typer.BadParameter(f"--budget {text}: give a share such as 0.5, or a number such as 3.") from None


def transfer(
    model: Model,
    texts: Texts,
    output: Output,
    teacher: Annotated[
        str | None,
        typer.Option(help="The stock model that teaches. Default: the one that was patched, by its Hub name."),
    ] = None,
    method: Annotated[str, typer.Option(help="auto, average (closed forms alone) or distill.")] = "auto",
    steps: Annotated[int, typer.Option(min=0, help="Training steps.")] = 900,
    batch_size: BatchSize = 32,
    column: Column = "text",
    seed: Seed = 0,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Teach a converted model to attend as its stock teacher does, and save it. Without labels.

    \b
    Example:
      hf-synthesizer transfer converted --teacher bert-base-uncased --texts texts.txt --output taught
    """
    with working():
        from ..layers.patched import max_length_of
        from ..transfer import transfer_attention
        from ..transfer.texts import read_texts, text_batches

        require_folder(output)
        rows = read_texts(texts, column)
        made_of = base_of(model)
        if made_of is None:
            raise CommandError(
                f"{model} is stock: convert it first, hf-synthesizer patch {model} --variant … --output …"
            )
        base = teacher or made_of
        if not base:
            raise CommandError(f"{model} does not say which stock model it was made of: name it with --teacher.")
        if base_of(base) is not None:
            raise CommandError(f"--teacher {base} is converted itself: name the stock model that it was made of.")
        student, stock, tokenizer = load(model, task, auto_class), load(base, task, auto_class), load_tokenizer(model)
        loader = text_batches(
            rows, tokenizer, student, batch_size=batch_size, max_length=max_length_of(student), seed=seed
        )
        found = transfer_attention(student, stock, loader, method, steps, progress=watched())
        save(student, model, output)
    show({**found.to_dict(), "output": str(output)}, f"{found}\nsaved in {output}", json)
