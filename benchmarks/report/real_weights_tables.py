"""The tables of `benchmarks/pretrained/real_weights.py`."""

from __future__ import annotations

from benchmarks.measurements.records import RESULTS, read
from benchmarks.report.table_text import markdown, provenance


def real_equal() -> str:
    """How far `random+dot_product` with `mixing="sum"` is from stock on real text."""
    rows = [row for row in read(RESULTS / "real_weights.csv") if row["difference"]]
    lines = [
        [row["model"], row["model_class"], row["of_layers"], row["difference"], row["largest"], row["measure"]]
        + [_score(row["stock"]), _score(row["score"])]
        for row in rows
    ]
    head = ["model", "class", "layers", "largest difference", "of numbers up to", "measure", "stock", "mixture"]
    return markdown(head, lines) + "\n\n" + provenance(rows)


def real_weights() -> str:
    """What pretrained models keep in a quarter, half and all of their layers, by closed forms alone."""
    rows = [row for row in read(RESULTS / "real_weights.csv") if not row["difference"]]
    shares = ("quarter", "half", "all")
    of = {(row["model"], row["variant"], row["mode"]): row for row in rows}
    lines = []
    for model, variant in dict.fromkeys((row["model"], row["variant"]) for row in rows):
        found = [of.get((model, variant, share)) for share in shares]
        first = next(row for row in found if row)
        arrow = "↑" if first["more_is_better"] == "True" else "↓"
        cells = [_score(row["score"]) if row and row["status"] == "ok" else "" for row in found]
        if first["status"] != "ok":
            cells[-1] = "no closed form"
        lines.append([model, f"{first['measure']} {arrow}", variant, _score(first["stock"]), *cells])
    head = ["model", "measure", "variant", "stock", *(f"{share} of the layers" for share in shares)]
    head[-1] = "all layers"
    return markdown(head, lines) + "\n\n" + provenance(rows)


def _score(text: str) -> str:
    number = float(text)
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 1000 else f"{number:.0f}"
