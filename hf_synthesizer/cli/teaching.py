"""`suggest` and `transfer`: choose layers or heads to synthesize, and transfer stock attention to them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import CommandError, redirect_output, require_folder, show, shows_progress
from .models import base_model_of, load, load_tokenizer
from .options import (
    AutoClass,
    BatchSize,
    Json,
    MaxLength,
    Model,
    Options,
    Output,
    Task,
    parse_budget,
    parse_kind,
    parse_options,
)
from .patching import save
from .sentences import load_sentences

Texts = Annotated[
    Path,
    typer.Option(
        help="A file with one text on each line, or a .jsonl file. No labels are needed.", exists=True, dir_okay=False
    ),
]
Column = Annotated[str, typer.Option(help="The column of a .jsonl file that has the texts.")]
Seed = Annotated[int, typer.Option(help="The seed for the order of the texts.")]


class By(StrEnum):
    """The units that `suggest` chooses."""

    LAYERS = "layers"
    HEADS = "heads"


def suggest(
    model: Model,
    variant: Annotated[
        list[str],
        typer.Option(
            metavar="VARIANT",
            help="The variant for the chosen layers or heads, with options of its own after a colon: "
            "dot_product:window=64,sinks=2. For heads, repeat it for a menu: each head gets one of them or stays stock.",
        ),
    ],
    texts: Texts,
    by: Annotated[By, typer.Option(help="Choose whole layers, or heads of all layers.")] = By.LAYERS,
    budget: Annotated[
        str | None,
        typer.Option(
            help="A share, such as 0.5, or a number, such as 3. For heads also a share of stock's cache or multiply-adds at a "
            "length, such as cache=0.3@8192 or multiply_adds=0.5@2048; and several budgets, separated by commas: all are "
            "measured, and the last makes the plan. Default: 0.5 of the layers, 0.9 of the heads."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Training steps of the logits before the measurement. Default: 150, or none for heads "
            "of a variant with a closed form.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="The number of batches for the measurement.")] = 8,
    batch_size: BatchSize = 32,
    max_length: MaxLength = None,
    option: Options = None,
    column: Column = "text",
    seed: Seed = 0,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Measure the cost of synthesizing each layer or head, and suggest which to synthesize. `patch --plan` reads the JSON.

    The cost of a head is the change of the model's answers, so name a model that was fine-tuned on its task.

    \b
    Examples:
      hf-synthesizer suggest bert-base-uncased --variant random --budget 0.5 --texts texts.txt --json > plan.json
      hf-synthesizer suggest tuned --by heads --variant random+salience --budget 0.5,0.9 --texts texts.txt --json > plan.json
      hf-synthesizer suggest gpt2 --by heads --variant relative --variant dot_product:window=64 --budget cache=0.3@1024 --texts texts.txt
    """
    budgets = [] if budget is None else [parse_budget(part) for part in budget.split(",")]
    if by is By.LAYERS and len(budgets) > 1:
        raise typer.BadParameter(f"--budget {budget}: several budgets need --by heads; give one share or number.")
    if by is By.LAYERS and len(variant) > 1:
        raise typer.BadParameter("Several --variant make a menu, and a menu needs --by heads; give one variant.")
    kinds = [parse_kind(part) for part in variant]
    options = parse_options(option, None)
    with redirect_output():
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
        configs = [SynthesizerConfig(**{**options, **kind}) for kind in kinds]  # so the plan contains the options too
        configs = configs if max_length is None else [config.for_length(max_length) for config in configs]
        measuring: dict[str, Any] = {} if steps is None else {"steps": steps}
        measuring |= {"batches": batches, "progress": shows_progress()}
        if by is By.HEADS:
            suggestion = suggest_heads(teacher, loader, configs, budgets or 0.9, **measuring)
        else:
            suggestion = suggest_layers(teacher, loader, configs[0], budgets[0] if budgets else 0.5, **measuring)
    show(suggestion.to_dict(), str(suggestion), json)


def transfer(
    model: Model,
    texts: Texts,
    output: Output,
    teacher: Annotated[
        str | None,
        typer.Option(help="The stock model to learn from. Default: the model that was patched."),
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
    """Train a converted model to attend like its stock teacher, and save it. No labels are needed.

    \b
    Example:
      hf-synthesizer transfer converted --teacher bert-base-uncased --texts texts.txt --output taught
    """
    with redirect_output():
        from ..layers.lengths import max_length_of
        from ..transfer import transfer_attention
        from ..transfer.texts import read_texts, text_batches

        require_folder(output)
        rows, base_model = read_texts(texts, column), base_model_of(model)
        if base_model is None:
            raise CommandError(
                f"{model} is stock: convert it first, hf-synthesizer patch {model} --variant … --output …"
            )
        base = teacher or base_model
        if not base:
            raise CommandError(f"{model} does not name its stock model: name it with --teacher.")
        if base_model_of(base) is not None:
            raise CommandError(f"--teacher {base} is converted itself: name its stock model.")
        student, stock, tokenizer = load(model, task, auto_class), load(base, task, auto_class), load_tokenizer(model)
        loader = text_batches(
            rows, tokenizer, student, batch_size=batch_size, max_length=max_length_of(student), seed=seed
        )
        result = transfer_attention(student, stock, loader, method, steps, progress=shows_progress())
        save(student, model, output)
    show({**result.to_dict(), "output": str(output)}, f"{result}\nsaved in {output}", json)


COMMANDS = (suggest, transfer)
