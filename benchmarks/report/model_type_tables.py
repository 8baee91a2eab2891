"""What the documents say of `coverage.csv`: which types each layer class serves, and why the others are not served."""

from __future__ import annotations

import re
from collections import defaultdict

from benchmarks.measurements.records import RESULTS, Row, read

Table = tuple[list[str], list[list[str]]]

REASONS = (
    # what an error says, and how the documents call it
    ("through Transformers' attention interface", "attends without Transformers' attention interface"),
    ("passes (s_aux|sinks)= on", "attention sinks (`s_aux`), which a softmax over keys alone does not have"),
    ("adds logits of its own|makes a bias of its own", "adds logits of its own (relative positions by content)"),
    (
        "more by the name of the attention backend",
        "an indexer chooses keys by their content, under the stock backends alone",
    ),
    ("attends in pieces", "attends in windows, or to other tokens than its hidden states"),
    ("attends more than once", "attends more than once in one forward pass"),
    ("says its size in a way", "projections that are no linear layers"),
    ("no projection of its own", "no projections of its own"),
    ("Transformers writes", "saved by Transformers with projections joined, which leaves no place for a guard"),
    ("The cache keeps", "attends to fewer keys than it has hidden states"),
    ("Synthesized layers know the caches", "a cache of the model's own kind"),
    ("none of the classes that Transformers exports", "a model class that Transformers does not export"),
    ("a part of other types", "a part of other types, without a model class that Transformers exports"),
    ("ran on no inputs", "built, but the rule knows no inputs for it"),
    ("inputs reach no layer", "runs, but the rule's inputs reach no self-attention"),
    ("library but it was not found|No module named", "needs a package that is not installed"),
    ("parameters under the rule", "stays large under the rule"),
    ("its config:|the model:", "the rule makes no config that it accepts"),
)


def coverage_rows() -> list[Row]:
    return read(RESULTS / "coverage.csv")


def served() -> Table:
    """The types that pass all laws, by layer class."""
    types = defaultdict(list)
    for row in coverage_rows():
        if row["status"] == "served":
            types[row["layer_class"]].append(row["model_type"] + ("*" if "max_length=" in row["why"] else ""))
    lines = [
        [_layer_classes(layer_class), str(len(names)), ", ".join(names)]
        for layer_class, names in sorted(types.items(), key=lambda item: (" " in item[0], -len(item[1]), item[0]))
    ]
    return ["layer class", "types", "model types"], lines


def not_served(status: str) -> Table:
    """The types of that status, by reason."""
    types = defaultdict(list)
    for row in coverage_rows():
        if row["status"] == status:
            types[reason(row["why"])].append(row["model_type"])
    lines = [
        [why, str(len(names)), ", ".join(names)] for why, names in sorted(types.items(), key=lambda i: -len(i[1]))
    ]
    return ["why", "types", "model types"], lines


def reason(why: str) -> str:
    """What a message comes down to; the message itself, where that is not known."""
    return next((short for pattern, short in REASONS if re.search(pattern, why)), why.replace("|", "\\|"))


def _layer_classes(layer_class: str) -> str:
    return " and ".join(f"`{name}`" for name in layer_class.split())
