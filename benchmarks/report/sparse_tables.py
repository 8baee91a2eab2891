"""The tables of `benchmarks/sparse/`: variants that choose their keys."""

from __future__ import annotations

from benchmarks.measurements.records import RESULTS, read
from benchmarks.report.table_text import markdown, provenance


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
