"""MODEL on the command line: a name on the Hub or a folder, and the head that it is loaded with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import CommandError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def load(model: str, task: str | None = None, auto_class: str | None = None) -> PreTrainedModel:
    """The model with its weights. Where its config names a head of which the checkpoint has no weights, the model without a
    head: Transformers would draw one at random. A head that was asked for is drawn.

    Raises:
        CommandError: for a model that cannot be had, or not with such a head.
    """
    from transformers import AutoModel

    from ..checkpoints.fresh_heads import fresh_weights

    config = load_config(model)
    cls = _class_of(config, task, auto_class)
    loaded = _loaded(cls, model)
    fresh = fresh_weights(loaded)
    if not fresh or cls is AutoModel:
        return loaded
    missing = f"{model} has no weights for {fresh[0]}, and {len(fresh)} in all, of {type(loaded).__name__}"
    if task or auto_class:
        typer.echo(f"{missing}: they are drawn at random, and mean nothing before they are trained.", err=True)
    elif type(config) in AutoModel._model_mapping:
        body = _loaded(AutoModel, model)
        if type(body) is not type(loaded):
            typer.echo(f"{missing}: {type(body).__name__} is loaded instead, without that head.", err=True)
            return body
    return loaded


def _loaded(cls: Any, model: str) -> PreTrainedModel:
    from ..checkpoints.fresh_heads import remember_fresh

    try:
        loaded, info = cls.from_pretrained(model, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise _cannot(model, error) from error
    remember_fresh(loaded, info)
    return loaded


def outline(model: str, task: str | None = None, auto_class: str | None = None) -> PreTrainedModel:
    """The model without weights, on the meta device: its config is all that is read.

    Raises:
        CommandError: as `load` does.
    """
    import torch

    config = load_config(model)
    cls = _class_of(config, task, auto_class)
    try:
        with torch.device("meta"):
            return cls.from_config(config) if hasattr(cls, "from_config") else cls._from_config(config)
    except ValueError as error:
        raise _cannot(model, error) from error


def load_config(model: str) -> Any:
    """The config.

    Raises:
        CommandError: for a model that cannot be had.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _cannot(model, error) from error


def base_of(model: str) -> str | None:
    """The stock model that a converted one was made of, "" where it does not say; None for a stock model.

    Raises:
        CommandError: for a model that cannot be had.
    """
    settings = getattr(load_config(model), "synthesizer", None)
    return None if settings is None else settings.get("base_model") or ""


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer.

    Raises:
        CommandError: where there is none.
    """
    found = find_tokenizer(model)
    if found is None:
        raise CommandError(f"{model} has no tokenizer, and this command reads texts.")
    return found


def find_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        return None


def _class_of(config: Any, task: str | None, auto_class: str | None) -> Any:
    import transformers

    from ..errors import did_you_mean

    if task and auto_class:
        raise CommandError("Both --task and --auto-class were given: leave one of them out.")
    if task:
        from transformers.pipelines import check_task

        try:
            _, targeted, _ = check_task(task)
        except KeyError as error:
            raise CommandError(str(error.args[0])) from error
        classes = targeted["pt"]
        if not classes:
            raise CommandError(f"--task {task} does not say which head a model has: take --auto-class.")
        return classes[0]
    if auto_class:
        cls = getattr(transformers, auto_class, None) if auto_class.startswith("AutoModel") else None
        if cls is None:
            known = [name for name in dir(transformers) if name.startswith("AutoModel")]
            raise CommandError(f"Transformers has no Auto class {auto_class!r}.{did_you_mean(auto_class, known)}")
        return cls
    for name in getattr(config, "architectures", None) or ():
        if name.startswith("Synthesizer"):
            from .. import models

            return getattr(models, name)
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _cannot(model: str, error: Exception) -> Exception:
    from ..errors import SynthesizerError

    if isinstance(error, SynthesizerError):
        return error
    if model.startswith((".", "/", "~")) and not Path(model).exists():
        return CommandError(f"{model!r} cannot be loaded: there is no such folder.")
    reason = " ".join(str(error).split())
    return CommandError(
        f"{model!r} cannot be loaded: {reason[:400]}{'…' * (len(reason) > 400)} Name a folder with a config.json, or a model on "
        f"the Hub that this machine can reach."
    )
