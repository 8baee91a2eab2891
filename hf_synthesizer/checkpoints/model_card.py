"""The model card (README.md) of a patched model: what was swapped, what it cost, how to load it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache, wraps
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedModel
from transformers.modelcard import (
    TASK_MAPPING,
    extract_hyperparameters_from_trainer,
    make_markdown_table,
    parse_log_history,
)
from transformers.utils import logging

from ..config import HeadGroupsConfig, LayerConfig, ranges
from ..errors import NotPatchedError
from ..layers.mixin import SynthesizerMixin
from ..patching.attention_layers import find_attention_layers
from ..patching.counting import count_parameters
from ..patching.report import patch_report
from ..patching.swap import TAGS
from ..synthesizers.mixture import MixtureSynthesizer
from ..synthesizers.registry import get_variant
from ..version import HOW_TO_INSTALL
from .auto import serving_auto_classes
from .model_mixin import stock_class
from .tokenizer_length import longest_input, shorten
from .whole_files import write_whole

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.get_logger(__name__)

FILE = "README.md"
BEGIN = "<!-- hf_synthesizer: this part is written anew at each save -->"
END = "<!-- hf_synthesizer: end -->"
EMPTY = "---\n{}\n---\n"


def write_model_card(
    model: PreTrainedModel, folder: str | Path, *, repo_id: str | None = None, trainer: Trainer | None = None
) -> None:
    """Write `README.md` into a folder, or bring the one that is there up to date.

    Of a card that somebody wrote, the text and the metadata stay as they are; our part is added at its end, or renewed
    where it stands, and metadata that the card does not have yet.

    Args:
        model: a patched model.
        folder: where `README.md` lies, or will.
        repo_id: the model's name on the Hub, for the line of code that loads it; the folder's name if None.
        trainer: the Trainer that trained it, if the card should report its results.
    """
    path = Path(folder) / FILE
    existing = path.read_text(encoding="utf-8") if path.exists() else None
    try:
        card = model_card(model, existing, repo_id=repo_id or path.parent.resolve().name, trainer=trainer)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        if existing is None:
            raise
        logger.warning("%s stays as it is: its metadata cannot be read (%s).", path, error)
        return
    write_whole(path, card)


def model_card(
    model: PreTrainedModel, existing: str | None = None, *, repo_id: str, trainer: Trainer | None = None
) -> str:
    """The text of the card, with its metadata; `existing` is a card to be merged into it."""
    card = ModelCard(existing or EMPTY)
    ours = _metadata(model)
    data = _merge(card.data.to_dict(), ours)
    section = _section(model, repo_id, trainer)
    if not _own_words(card.text):
        text = f"# {repo_id.rpartition('/')[2]}\n\n{section}"
    elif BEGIN in card.text and END in card.text:
        before, _, rest = card.text.partition(BEGIN)
        text = before + section + rest.partition(END)[2]
    else:
        text = f"{card.text.rstrip()}\n\n{section}"
    return f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n"


def attach_model_card(trainer: Trainer) -> None:
    """From now on this trainer's `create_model_card` and `push_to_hub` write our card, with the training results.

    Trainer writes a card of its own, over whatever is there. Its metadata (datasets, metrics, license) are kept; a card
    that somebody wrote, in the output folder or on the Hub, is merged. The trainer's tokenizer, which it saves beside the
    model, truncates at the model's longest input from now on.

    Raises:
        NotPatchedError: when the trainer's model is not patched.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not any(isinstance(module, SynthesizerMixin) for module in model.modules()):
        raise NotPatchedError(
            f"attach_model_card() describes synthesized layers, but the trainer's {type(model).__name__} has none. "
            f"Call patch_model() on the model before the Trainer is made."
        )
    shorten(trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None), model)
    create_trainers_card = trainer.create_model_card

    @wraps(create_trainers_card)
    def create_model_card(*args: Any, **kwargs: Any) -> None:
        if not trainer.is_world_process_zero():
            return
        path = Path(str(trainer.args.output_dir)) / FILE
        card = ModelCard(_somebodys_card(path, trainer.hub_model_id) or EMPTY)
        create_trainers_card(*args, **kwargs)
        card.data = _merge(card.data.to_dict(), ModelCard.load(path).data.to_dict())
        write_whole(path, str(card))
        write_model_card(model, path.parent, repo_id=trainer.hub_model_id, trainer=trainer)

    trainer.create_model_card = create_model_card  # type: ignore[method-assign]


def _merge(data: dict[str, Any], further: dict[str, Any]) -> ModelCardData:
    """What a card says stays; what it does not say is added, and so are tags."""
    tags = dict.fromkeys([*(data.get("tags") or []), *(further.get("tags") or [])])
    return ModelCardData(**{**further, **data, "tags": list(tags)})


def _somebodys_card(path: Path, repo_id: str | None) -> str | None:
    """The card in the folder if somebody wrote in it, else the one on the Hub."""
    local = path.read_text(encoding="utf-8") if path.exists() else None
    if repo_id is not None and (local is None or not _own_words(ModelCard(local).text)):
        with suppress(EntryNotFoundError, RepositoryNotFoundError):
            return ModelCard.load(repo_id).content
    return local


def _own_words(text: str) -> str:
    """What somebody wrote: the text without our part, the title above it, and the empty form of Transformers."""
    before, _, rest = text.partition(BEGIN)
    words = re.sub(r"\A# .*\n*\Z", "", before.strip()) + rest.partition(END)[2].strip()
    return "" if words == _empty_form() else words


@cache
def _empty_form() -> str:
    """The empty form that Transformers pushes where there is no card."""
    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
        "automatically generated."
    )
    return ModelCard.from_template(ModelCardData(), model_description=description).text.strip()


def _metadata(model: PreTrainedModel) -> dict[str, Any]:
    variants = {name for row in _variants(model) for name in row["names"]}
    data: dict[str, Any] = {"library_name": "transformers", "tags": [*TAGS, *sorted(variants)]}
    if base_model := model.config.synthesizer.get("base_model"):
        data["base_model"] = base_model
    name = stock_class(model).__name__
    mappings: dict[str, Any] = TASK_MAPPING
    if task := next((task for task, mapping in mappings.items() if name in mapping.values()), None):
        data["pipeline_tag"] = task
    return data


def _variants(model: PreTrainedModel) -> list[dict[str, Any]]:
    """One row for each configuration that some layers share."""
    layers: dict[str, list[SynthesizerMixin]] = {}
    names: dict[str, dict[str, list[int]]] = {}
    for attention_layer in find_attention_layers(model)[0]:
        if isinstance(attention_layer.module, SynthesizerMixin):
            key = json.dumps(attention_layer.module.synthesizer.config.to_dict(), sort_keys=True)
            layers.setdefault(key, []).append(attention_layer.module)
            names.setdefault(key, {}).setdefault(attention_layer.stack, []).append(attention_layer.index)
    rows = []
    for key, modules in layers.items():
        config = modules[0].synthesizer.config
        settings = {"max_length": config.max_length, **config.non_default()}
        rows.append(
            {
                "variant": config.variant,
                "names": _names(config),
                "formula": _formula(config),
                "weights": f"{count_parameters(modules[0].synthesizer):,}",
                "layers": "; ".join(f"{stack} {', '.join(map(str, row))}" for stack, row in names[key].items()),
                "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
            }
        )
    return rows


def _names(config: LayerConfig) -> set[str]:
    """The variants, and the parts of mixtures, that a layer has."""
    if isinstance(config, HeadGroupsConfig):
        return set().union(*map(_names, config.groups))
    return {config.variant, *config.parts}


def _formula(config: LayerConfig) -> str:
    if isinstance(config, HeadGroupsConfig):
        made = [f"heads {ranges(group.heads or ())}: {_formula(group)}" for group in config.groups]
        if config.stock_heads:
            made.append(f"heads {ranges(config.stock_heads)}: the stock attention")
        return "<br>".join(made)
    if len(config.parts) == 1:
        return get_variant(config.variant).formula
    parts = [f"S_{name} = {get_variant(name).formula}" for name in config.parts]
    return "<br>".join([MixtureSynthesizer.formula, *parts])


def _section(model: PreTrainedModel, repo_id: str, trainer: Trainer | None) -> str:
    """Our part, from the template."""
    report = patch_report(model)
    results: dict[str, Any] = {}
    history, hyperparameters = None, {}
    if trainer is not None:
        _, lines, final = parse_log_history(trainer.state.log_history)
        results = {name: value for name, value in (final or {}).items() if name not in ("epoch", "step")}
        history = make_markdown_table(lines) if lines else None
        hyperparameters = extract_hyperparameters_from_trainer(trainer)
    return _template().render(
        begin=BEGIN,
        end=END,
        repo=repo_id,
        how_to_install=HOW_TO_INSTALL,
        base_model=model.config.synthesizer.get("base_model"),
        stock_class=stock_class(model).__name__,
        auto_class=(serving_auto_classes(model) or [type(model).__name__])[0],
        swapped=len(report.swapped),
        total=len(report.layers),
        variants=_variants(model),
        longest=longest_input(model),
        logits_before=sum(layer.before for layer in report.swapped),
        logits_after=sum(layer.after for layer in report.swapped),
        parameters_before=report.parameters_before,
        parameters_after=report.parameters_after,
        results=results,
        history=history,
        hyperparameters=hyperparameters,
    )


@cache
def _template() -> jinja2.Template:
    source = files(__package__).joinpath("templates", "model_card.md").read_text(encoding="utf-8")
    return jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(source)
