"""`attention_page`: one interactive HTML file of attention, without a server or a network."""

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
from .recorded import load_tokenizer, record, words_of
from .tables import Table, describe_table, tables_of

TEMPLATE = Path(__file__).parent / "templates" / "attention.html"
MOST_POSITIONS = 64
"""The largest number of positions of a table that the page shows."""


def attention_page(
    model: PreTrainedModel,
    texts: str | Sequence[str],
    teacher: PreTrainedModel | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int = 128,
    title: str | None = None,
) -> str:
    """Make a page that shows where every head of every layer looks: choose text, layer and head, and point at a token.

    The page is one file. It needs no network, and shows whatever a text contains as text.

    Args:
        model: a patched or a stock model.
        texts: a text, or several.
        teacher: the stock model, shown beside the model.
        tokenizer: the model's tokenizer; the one beside its checkpoint if None.
        max_tokens: longer texts are truncated.
        title: the title of the page; the model's name if None. Of a folder, the page shows only the last part of the path.

    Returns:
        HTML, for a file: `Path("attention.html").write_text(page, encoding="utf-8")`.

    Raises:
        InvalidConfigError: for no texts, or no tokenizer.
        UnsupportedModelError: for a model that returns no weights.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise InvalidConfigError("There are no texts to show. Give at least one.")
    model = model_in(model)
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    lengths = [max_length_of(one) or max_tokens for one in (model, teacher) if one is not None]
    shown: list[dict[str, Any]] = []
    for text in texts:
        batch = tokenizer(text, truncation=True, max_length=min(max_tokens, *lengths), return_tensors="pt")
        tokens = words_of(tokenizer, batch["input_ids"][0].tolist())
        shown.append(
            {
                "tokens": tokens,
                "layers": _layers(model, batch),
                "teacher": [] if teacher is None else _layers(teacher, batch),
            }
        )
    length = max(len(text["tokens"]) for text in shown)
    data = {"texts": shown, "tables": _tables(model, min(length, MOST_POSITIONS))}
    page = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    return page.render(title=title or f"Attention of {_name(model)}", data=_script_json(data))


def _name(model: PreTrainedModel) -> str:
    """The model's name. A page is for others, so it hides where the model's folder is on this machine."""
    name = model.name_or_path
    return (Path(name).resolve().name if Path(name).is_dir() else name) if name else type(model).__name__


def _layers(model: PreTrainedModel, batch: Any) -> list[dict[str, Any]]:
    return [
        {"label": layer.label, "attention": layer.attention, "heads": [_pack(head) for head in layer.weights[0]]}
        for layer in record(model, batch)
    ]


def _pack(weights: torch.Tensor) -> str:
    """Weights between 0 and 1 as 16-bit numbers, base64."""
    levels = (weights.clamp(0, 1) * 65535).round().to(torch.int32).numpy().astype("<u2")
    return base64.b64encode(levels.tobytes()).decode("ascii")


def _tables(model: PreTrainedModel, length: int) -> dict[str, list[dict[str, Any]]]:
    """The tables of each layer that have key positions as columns. Those of logits are shown as weights."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for table in tables_of(model):
        if table.columns.startswith("key position"):
            tables.setdefault(table.layer, []).append(_table(table, length))
    return tables


def _table(table: Table, length: int) -> dict[str, Any]:
    values = table.values[:, :length, :length] if table.is_static else table.values[..., :length]
    signed = table.symbol == "W2"
    maps, words = [], []
    for head, logits in enumerate(values):
        if signed:
            top = max(float(logits.abs().max()), 1e-12)
            maps.append(_pack(0.5 + logits / (2 * top)))
            meaning = "how much each hidden unit of a token (a row) asks for each key position (a column); orange is "
            meaning += f"against it, purple for it, up to ±{top:.2g}."
        else:
            maps.append(_pack(logits.softmax(-1)))
            meaning = "the weight of each key position before a token adds its own part."
        words.append(f"{table.symbol}: {describe_table(table, head, length) if table.is_static else meaning}")
    size = {"rows": values.shape[-2], "columns": values.shape[-1]}
    return {"part": table.part, "signed": signed, **size, "heads": maps, "words": words}


def _script_json(data: Any) -> Any:
    """JSON that cannot end the script element around it."""
    text = json.dumps(data, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    from markupsafe import Markup

    return Markup(text)
