#!/usr/bin/env python
"""Writes the tables of the documents from benchmarks/results, between pairs of comments.

    python benchmarks/tables.py            # writes them
    python benchmarks/tables.py --check    # only says whether documents and results agree

`<!-- table: speed (benchmarks/tables.py) -->` … `<!-- end of table -->` is where the table `speed` goes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import attention_bars
import attention_tables
import coverage_table
import covered_lines
from blocks import CHOOSING
from records import RESULTS, ROOT, Row, read
from table_text import by_variant, chosen, markdown, provenance, speedup

DOCUMENTS = (
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / name for name in ("models.md", "performance.md", "real_weights.md", "sparse.md")),
)
PLACE = re.compile(r"(<!-- table: ([a-z0-9_-]+) \(benchmarks/tables\.py\) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def startup() -> str:
    """What users wait for first."""
    rows = read(RESULTS / "startup.csv")
    lines = [
        [
            row["mode"],
            row["variant"],
            f"{float(row['median_ms']):.0f}",
            f"{float(row['least_ms']):.0f}–{float(row['most_ms']):.0f}",
        ]
        for row in rows
    ]
    return markdown(["what", "of", "ms", "least and most"], lines) + "\n\n" + provenance(rows)


def memory() -> str:
    """Peak memory of one run at length 4096, batch 1, beside what the weights take."""
    rows = read(RESULTS / "memory.csv")
    columns: list[tuple[str, dict[str, Row], str]] = []
    for mode, title in (("inference", "inference"), ("train", "training")):
        found = chosen(rows, mode=mode, padding="none", length="4096", batch_size="1")
        if found:
            columns.append((f"peak, {title}", found, "peak_mb"))
    columns.append(("weights", columns[0][1], "weights_mb"))
    names = dict.fromkeys(name for _, found, _ in columns for name in found)
    lines = [
        [name, *(f"{float(found[name][column]):.0f}" if name in found else "" for _, found, column in columns)]
        for name in names
    ]
    used = [row for _, found, _ in columns for row in found.values()]
    return markdown(["attention", *(f"{title}, MB" for title, *_ in columns)], lines) + "\n\n" + provenance(used)


def decode() -> str:
    """Decoding 256 tokens."""
    found = chosen(read(RESULTS / "decode.csv"), length="256", batch_size="1")
    lines = [
        [name, row["tokens_per_second"], speedup(row), row["cache_mb"], row["cache_share"]]
        for name, row in found.items()
    ]
    head = ["decoder self-attention", "tokens/s", "speed to stock", "cache, MB", "cache to stock"]
    return markdown(head, lines) + "\n\n" + provenance(list(found.values()))


def models() -> str:
    """Whole models, ragged inference."""
    rows = [row for row in read(RESULTS / "model.csv") if row["model"] != "minilm"]
    columns = [
        (f"{model}, {length}×{batch_size}", chosen(rows, **dict(zip(names, (model, length, batch_size), strict=True))))
        for names in [("model", "length", "batch_size")]
        for model, length, batch_size in dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    ]
    return by_variant(columns, speedup)


def choosing() -> str:
    """Whole models whose layers choose their keys: times stock eager's time; both were measured against stock SDPA."""
    rows = read(RESULTS / "model.csv")
    columns, eager = [], {}
    names = ("padding", "length", "batch_size")
    cells = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    for conditions in sorted(cells, key=lambda cell: (int(cell[1]), cell)):
        found = chosen(rows, model="minilm", mode="inference", **dict(zip(names, conditions, strict=True)))
        padding, length, batch_size = conditions
        if "stock eager" in found:
            title = f"{length}×{batch_size}{', ragged' if padding == 'ragged' else ''}"
            columns.append((title, {name: found[name] for name in CHOOSING if name in found}))
            eager |= dict.fromkeys(map(id, found.values()), float(found["stock eager"]["speedup"]))
    return by_variant(columns, lambda row: f"{eager[id(row)] / float(row['speedup']):.2f}")


def compression() -> str:
    """What a tolerance buys at each length."""
    rows = read(RESULTS / "compression.csv")
    lines = [
        [
            row["variant"],
            row["length"],
            row["rank"],
            row["error"],
            f"{float(row['median_ms']):.1f}",
            speedup(row),
            row["growth"],
        ]
        for row in sorted(
            rows,
            key=lambda row: (
                list(dict.fromkeys(r["variant"] for r in rows)).index(row["variant"]),
                int(row["length"]),
            ),
        )
    ]
    head = ["attention", "L", "rank", "error", "ms", "speed to stock", "growth"]
    return markdown(head, lines) + "\n\n" + provenance(rows)


def explore() -> str:
    """What was tried, beside what was kept."""
    rows = read(RESULTS / "explore.csv")
    lines = [
        [row["model"], row["length"], row["variant"], row["median_ms"], row["relative"], row["gflops"]] for row in rows
    ]
    head = ["experiment", "L", "way", "ms", "speed to the way kept", "GFLOP/s"]
    return markdown(head, lines) + "\n\n" + provenance(rows)


def starts() -> str:
    """Where a shared projection may start."""
    rows = [row for row in read(RESULTS / "recall.csv") if row["variant"].startswith("start: ")]
    lines = [[row["variant"].removeprefix("start: "), row["recall"], row["divergence"]] for row in rows]
    head = ["W starts as", "share of the 32 best keys", "divergence of the weights"]
    return markdown(head, lines) + "\n\n" + provenance([{**row, "threads": "any number of"} for row in rows])


def recall() -> str:
    """What the hashes find."""
    rows = [row for row in read(RESULTS / "recall.csv") if not row["variant"].startswith("start: ")]
    cases = dict.fromkeys((row["queries"], row["hashes"]) for row in rows if row["hashes"])
    found = {(row["variant"], row["queries"], row["hashes"]): row["recall"] for row in rows}
    lines = [
        [variant, *(found.get((variant, *case), found.get((variant, case[0], ""), "")) for case in cases)]
        for variant in dict.fromkeys(row["variant"] for row in rows)
    ]
    head = ["variant", *(f"{queries}, {hashes} hash{'es' * (hashes != '1')}" for queries, hashes in cases)]
    return markdown(head, lines) + "\n\n" + provenance([{**row, "threads": "any number of"} for row in rows])


def growth() -> str:
    """Long sequences."""
    rows = read(RESULTS / "growth.csv")
    modes = [(mode, padding) for mode in ("inference", "train") for padding in ("none", "ragged")]
    of = {(row["variant"], row["mode"], row["padding"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line = [variant]
        for mode, padding in modes:
            row = of.get((variant, mode, padding))
            line.append(f"{float(row['ms_4096']):.0f} (L^{row['exponent']})" if row else "")
        line += [
            of[variant, mode, "ragged"]["total_mb"] if (variant, mode, "ragged") in of else ""
            for mode, _ in modes[::2]
        ]
        lines.append(line)
    head = ["attention", *(f"ms, {mode}, {'unpadded' if p == 'none' else p}" for mode, p in modes)]
    head += ["MB, inference, ragged", "MB, train, ragged"]
    return markdown(head, lines) + "\n\n" + provenance(rows)


def flex() -> str:
    """Patterns by FlexAttention."""
    rows = read(RESULTS / "flex.csv")
    lines = [[row["variant"], row["length"], row["way"], f"{float(row['median_ms']):.1f}"] for row in rows]
    return markdown(["pattern", "L", "way", "ms"], lines) + "\n\n" + provenance(rows)


def faces() -> str:
    """One attention block behind each own face, relative to its stock module."""
    rows = read(RESULTS / "faces.csv")
    paddings = {"none": "", "ragged": ", ragged"}
    variants = dict.fromkeys(row["variant"] for row in rows if row["variant"] != "stock sdpa")
    of = {(row["model"], row["variant"], row["padding"]): row for row in rows if row["status"] == "ok"}
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = [of.get((model, variant, padding)) for variant in variants for padding in paddings]
        stock = next(row for row in found if row)["stock_sdpa_ms"]
        lines.append([model, f"{float(stock):.0f}", *(speedup(row) if row else "" for row in found)])
    head = ["block", "stock, ms", *(f"{variant}{title}" for variant in variants for title in paddings.values())]
    return markdown(head, lines) + "\n\n" + provenance(list(of.values()))


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


def served() -> str:
    """Which model types each face serves."""
    return markdown(*coverage_table.served())


def refused() -> str:
    """Which model types are refused, and why."""
    return markdown(*coverage_table.not_served("refused"))


def unbuilt() -> str:
    """Of which model types no tiny model was made, so that nothing was checked."""
    return markdown(*coverage_table.not_served("not built"))


def covered() -> str:
    """How much of the package the tests run."""
    return markdown(*covered_lines.table()) if covered_lines.FILE.exists() else "Not measured yet: `make coverage`."


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        attention_tables.speed,
        attention_tables.account,
        attention_bars.bars,
        attention_tables.held_down,
        attention_tables.slowest,
        startup,
        attention_tables.milliseconds,
        attention_tables.lengths,
        attention_tables.dropout,
        attention_tables.bfloat16,
        memory,
        compression,
        models,
        choosing,
        decode,
        explore,
        starts,
        recall,
        growth,
        flex,
        faces,
        real_equal,
        real_weights,
        served,
        refused,
        unbuilt,
        covered,
    )
}


def with_tables(text: str) -> str:
    """A document with its tables written anew."""

    def write(place: re.Match[str]) -> str:
        if place[2] not in TABLES:
            sys.exit(f"There is no table {place[2]!r}; there are: {', '.join(TABLES)}.")
        return f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[3]}"

    return PLACE.sub(write, text)


def main(argv: list[str] | None = None) -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document disagrees")
    arguments = parser.parse_args(argv)
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        written = with_tables(text)
        if arguments.check and written != text:
            sys.exit(f"{document.name} and the results disagree: run python benchmarks/tables.py.")
        document.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
