"""Load MODEL of the command line: a name on the Hub or a folder, with one of several heads. `CommandError` if it cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .console import CommandError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(model: str, task: str | None = None, auto_class: str | None = None) -> PreTrainedModel:
    """Load a model with its weights.

    If the config names a head and the checkpoint has no weights for it, the model is loaded without a head. If the user named
    the head, Transformers initialises it at random, with a message.
    """
    from transformers import MODEL_MAPPING, AutoModel

    from ..checkpoints.fresh_heads import fresh_weights

    config = load_config(model)
    cls = _model_class(config, task, auto_class)
    loaded = _load_pretrained(cls, model)
    fresh = fresh_weights(loaded)
    if not fresh or cls is AutoModel:
        return loaded
    missing = f"{model} has no weights for {fresh[0]}, and {len(fresh)} in all, of {type(loaded).__name__}"
    if task or auto_class:
        typer.echo(f"{missing}: they are initialised at random, and have to be trained.", err=True)
    elif type(config) in MODEL_MAPPING:
        body = _load_pretrained(AutoModel, model)
        if type(body) is not type(loaded):
            typer.echo(f"{missing}: {type(body).__name__} is loaded instead, without that head.", err=True)
            return body
    return loaded


def _load_pretrained(cls: Any, model: str) -> PreTrainedModel:
    """Load a model, and remember which weights Transformers initialised."""
    from ..checkpoints.fresh_heads import remember_fresh

    try:
        loaded, info = cls.from_pretrained(model, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise _loading_error(model, error) from error
    remember_fresh(loaded, info)
    return loaded


def build_without_weights(model: str, task: str | None = None, auto_class: str | None = None) -> PreTrainedModel:
    """Build a model on the meta device from its config alone."""
    import torch

    config = load_config(model)
    cls = _model_class(config, task, auto_class)
    try:
        with torch.device("meta"):
            return cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    except ValueError as error:
        raise _loading_error(model, error) from error


def load_config(model: str) -> Any:
    """Load the config of a model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _loading_error(model, error) from error


def base_model_of(model: str) -> str | None:
    """The name of the stock model of a converted model, "" if it is unknown. None for a stock model."""
    settings = getattr(load_config(model), "synthesizer", None)
    return None if settings is None else settings.get("base_model") or ""


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; `CommandError` if there is none."""
    tokenizer = find_tokenizer(model)
    if tokenizer is None:
        raise CommandError(f"{model} has no tokenizer, and this command reads texts.")
    return tokenizer


def find_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model; None if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        return None


def _model_class(config: Any, task: str | None, auto_class: str | None) -> Any:
    import transformers

    from ..errors import did_you_mean

    if task and auto_class:
        raise CommandError("--task and --auto-class exclude each other: give only one.")
    if task:
        from transformers.pipelines import check_task

        try:
            classes = check_task(task)[1]["pt"]
        except KeyError as error:
            raise CommandError(str(error.args[0])) from error
        if not classes:
            raise CommandError(f"--task {task} does not determine the head of a model: use --auto-class.")
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


def _loading_error(model: str, error: Exception) -> Exception:
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
