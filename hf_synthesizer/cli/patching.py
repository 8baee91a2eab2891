"""`patch`, `report` and `push`: convert a stock model, describe a model, and upload it to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import first_line
from .console import CommandError, redirect_output, require_folder, show
from .models import base_model_of, build_without_weights, find_tokenizer, load
from .options import (
    AutoClass,
    Json,
    Layers,
    MaxLength,
    Model,
    Options,
    Output,
    Plan,
    Task,
    Variant,
    numbers,
    parse_options,
    parse_variant,
    read_plan,
)
from .sentences import copy_sentence_files, sentence_files


def patch(
    model: Model,
    output: Output,
    variant: Variant = None,
    plan: Plan = None,
    layers: Layers = None,
    max_length: MaxLength = None,
    option: Options = None,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Replace self-attention by synthesized attention, and save the model with its tokenizer.

    The new attention has to be trained: with `transfer`, `finetune` or your own Trainer.

    \b
    Examples:
      hf-synthesizer patch bert-base-uncased --variant dense+salience --max-length 128 --output converted
      hf-synthesizer patch t5-small --variant factorized_random --option rank=16 --layers encoder --output converted
      hf-synthesizer patch bert-base-uncased --variant 0=random --variant 1=dense --output hybrid
      hf-synthesizer patch bert-base-uncased --plan plan.json --output converted
    """
    new_attention, options = parse_variant(variant, plan), parse_options(option, max_length)
    from ..layers.patch_report import patch_report
    from ..measuring.costs import describe_patch
    from ..patching.layer_text import parse_layers
    from ..patching.swap import patch_model

    with redirect_output():
        require_folder(output)
        base = base_model_of(model)
        if base is not None:
            raise CommandError(f"{model} is converted already: start from the stock model{base and f', {base}'}.")
        loaded = load(model, task, auto_class)
        if plan is not None:
            require_matching_plan(loaded, plan)
        patch_model(loaded, new_attention, layers=parse_layers(layers), **options)
        tokenizer = save(loaded, model, output)
    counts = patch_report(loaded)
    data = {"output": str(output), "tokenizer": tokenizer, **describe_patch(counts)}
    saved = f"saved in {output}" + ("" if tokenizer else ", without a tokenizer: the model has none")
    show(data, f"{counts}\n{saved}", json)


def report(
    model: Model,
    lengths: Annotated[
        str | None,
        typer.Option(help="Lengths in tokens, separated by commas. Default: those of 128,512,2048 that fit."),
    ] = None,
    task: Task = None,
    auto_class: AutoClass = None,
    json: Json = False,
) -> None:
    """Report the synthesized layers of a model and their cost beside stock: parameters, operations, bytes of cache.

    Only the config is read.

    \b
    Example:
      hf-synthesizer report converted --lengths 128,512 --json
    """
    chosen = None if lengths is None else numbers(lengths, "--lengths")
    with redirect_output():
        from ..measuring.costs import cost_report

        costs = cost_report(build_without_weights(model, task, auto_class), chosen)
    show(costs.to_dict(), str(costs), json)


def push(
    folder: Annotated[Path, typer.Argument(help="The folder of a saved model.", show_default=False)],
    repository: Annotated[
        str, typer.Argument(help="The name on the Hub, such as me/bert-synthesizer.", show_default=False)
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that only you can see.")] = False,
    message: Annotated[str | None, typer.Option(help="The message of the commit.")] = None,
    json: Json = False,
) -> None:
    """Upload a saved model, its tokenizer and its model card to the Hub. Run `hf auth login` once before.

    \b
    Example:
      hf-synthesizer push taught me/bert-synthesizer
    """
    if not folder.is_dir():
        raise CommandError(f"{folder} is no folder: name one that `patch`, `transfer` or save_pretrained wrote.")
    with redirect_output():
        from huggingface_hub import upload_folder

        require_valid_name(repository)
        loaded: Any = load(str(folder))
        tokenizer, sentences = find_tokenizer(str(folder)), sentence_files(str(folder))
        options: dict[str, Any] = {} if message is None else {"commit_message": message}
        try:
            pushed = loaded.push_to_hub(repository, private=private or None, **options)
            if tokenizer is not None:
                tokenizer.push_to_hub(repository, **options)
            if sentences is not None:
                patterns = [pattern for name in sentences[1] for pattern in (name, f"{name}/*")]
                upload_folder(repo_id=repository, folder_path=folder, allow_patterns=patterns, **options)
        except Exception as error:  # no network, no token, no permission: each has its own error
            raise CommandError(
                f"{repository} cannot be written on the Hub: {first_line(error).rstrip('.')}. Check that the Hub is "
                f"within reach, and run `hf auth login` with an account that may write there."
            ) from error
    address = str(getattr(pushed, "repo_url", None) or repository)
    data = {"repository": repository, "address": address, "tokenizer": tokenizer is not None}
    show(data, f"pushed to {address}", json)


def require_valid_name(repository: str) -> None:
    """Check that the name of a repository is valid on the Hub; `CommandError` if not."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise CommandError(f"{repository!r} is no name of a repository: {str(error).rstrip('.')}.") from error


def require_matching_plan(model: Any, plan: Path) -> None:
    """Check that a plan was made for a model with as many layers; `CommandError` if not. A plan without costs passes."""
    from ..layers.finding.attention_layers import find_attention_layers

    measured, layers = read_plan(plan).costs, len(find_attention_layers(model)[0])
    if measured and len(measured) != layers:
        raise CommandError(
            f"{plan} was made for another model: it has costs for {len(measured)} layers, and {type(model).__name__} has {layers}."
        )


def save(model: Any, source: str, output: Path) -> bool:
    """Write a model, the tokenizer of its source, and its SentenceTransformer files. Returns whether there is a tokenizer."""
    from ..checkpoints.tokenizer_length import shorten
    from ..layers.finding.attention_layers import find_attention_layers
    from ..layers.lengths import max_text_length

    model.save_pretrained(output)
    tokenizer = find_tokenizer(source)
    if tokenizer is not None:
        shorten(tokenizer, model)
        tokenizer.save_pretrained(output)
    copy_sentence_files(source, output, max_text_length(find_attention_layers(model).layers))
    return tokenizer is not None


COMMANDS = (patch, report, push)
