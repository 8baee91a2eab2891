"""`attention_page`: one HTML file to touch attention in, without a server or a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidConfigError
from ..layers.lengths import max_length_of
from ..layers.sentence_transformers import model_in
from .recorded import LayerWeights, record, tokenizer_for, words_of
from .tables import Table, in_words, tables_of

TEMPLATE = Path(__file__).parent / "templates" / "attention.html"
SHOWN = 64
"""Positions of a table that the page shows at most."""


def attention_page(
    model: PreTrainedModel,
    texts: str | Sequence[str],
    teacher: PreTrainedModel | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int = 128,
    title: str | None = None,
) -> str:
    """A page that shows where every head of every layer looks: choose text, layer and head, and touch a token.

    The page is one file: it asks nothing of a network, and shows whatever a text contains as text.

    Args:
        model: a patched model, or a stock one.
        texts: a text, or several.
        teacher: the stock model, to be shown beside it.
        tokenizer: the model's own, beside its checkpoint, if None.
        max_tokens: longer texts are cut.
        title: of the page; the model's name if None, of a folder without the way to it.

    Returns:
        HTML, to be written to a file: `Path("attention.html").write_text(page, encoding="utf-8")`.

    Raises:
        InvalidConfigError: for no texts, or no tokenizer.
        UnsupportedModelError: for a model that gives no weights.
    """
    chosen = [texts] if isinstance(texts, str) else list(texts)
    if not chosen:
        raise InvalidConfigError("There are no texts to show. Give at least one.")
    model = model_in(model)
    tokenizer = tokenizer_for(model, tokenizer)
    longest = min(max_tokens, *(max_length_of(which) or max_tokens for which in (model, teacher) if which is not None))
    shown: list[dict[str, Any]] = []
    for text in chosen:
        batch = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        tokens = words_of(tokenizer, batch["input_ids"][0].tolist())
        shown.append(
            {
                "tokens": tokens,
                "layers": [_layer(layer) for layer in record(model, batch)],
                "teacher": [_layer(layer) for layer in record(teacher, batch)] if teacher is not None else [],
            }
        )
    length = max(len(text["tokens"]) for text in shown)
    name = title or f"Attention of {_name(model)}"
    data = {"texts": shown, "tables": _tables(model, length)}
    page = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    return page.render(title=name, data=_embedded(data))


def _name(model: PreTrainedModel) -> str:
    """A page is given to others: they need not know where on this machine the model lies."""
    name = model.name_or_path
    return (Path(name).resolve().name if Path(name).is_dir() else name) if name else type(model).__name__


def _layer(layer: LayerWeights) -> dict[str, Any]:
    weights = layer.weights[0]  # (H, L, L)
    return {
        "label": layer.label,
        "attention": layer.attention,
        "heads": [_packed(head) for head in weights],
    }


def _packed(weights: torch.Tensor) -> str:
    """Weights between 0 and 1 as 16-bit numbers, base64."""
    levels = (weights.clamp(0, 1) * 65535).round().to(torch.int32).numpy().astype("<u2")
    return base64.b64encode(levels.tobytes()).decode("ascii")


def _tables(model: PreTrainedModel, length: int) -> dict[str, list[dict[str, Any]]]:
    """By layer: what each of its tables says, head by head; those with positions as axes are shown as weights."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table in tables_of(model):
        if table.columns.startswith("key position"):
            found.setdefault(table.layer, []).append(_table(table, min(length, SHOWN)))
    return found


def _table(table: Table, length: int) -> dict[str, Any]:
    values = table.values[:, :length, :length] if table.is_static else table.values[..., :length]
    signed = table.symbol == "W2"
    if signed:
        shown = [_packed(0.5 + head / (2 * _top(head))) for head in values]
        words = [
            "W2: how much each hidden unit of a token (a row) asks for each key position (a column); orange is "
            f"against it, purple for it, up to ±{_top(head):.2g}."
            for head in values
        ]
    else:
        shown = [_packed(head.softmax(-1)) for head in values]
        words = [
            f"{table.symbol}: {in_words(table, head, length)}"
            if table.is_static
            else f"{table.symbol}: what each key position gets before a token has its say."
            for head in range(len(values))
        ]
    size = {"rows": values.shape[-2], "columns": values.shape[-1]}
    return {"part": table.part, "signed": signed, **size, "heads": shown, "words": words}


def _top(values: torch.Tensor) -> float:
    """The end of a scale around 0."""
    return max(float(values.abs().max()), 1e-12)


def _embedded(data: Any) -> Any:
    """JSON that ends no script element, whatever is in it."""
    text = json.dumps(data, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    from markupsafe import Markup

    return Markup(text)
