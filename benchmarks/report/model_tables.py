"""The tables of whole models and of one block beside the times of attention: memory, compression, what was tried."""

from __future__ import annotations

from benchmarks.block.blocks import CHOOSING
from benchmarks.measurements.records import RESULTS, Row, read
from benchmarks.report.table_text import by_variant, chosen, markdown, provenance, speedup


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


def cache_growth() -> str:
    """Speed and cache of a decoder as its context grows."""
    rows = [row for row in read(RESULTS / "cache_growth.csv") if row["status"] == "ok"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    found = {(row["variant"], row["length"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        line = [name]
        for length in lengths:
            row = found.get((name, length))
            line += [
                row[column] if row else "" for column in ("tokens_per_second", "speedup", "cache_mb", "cache_share")
            ]
        lines.append(line)
    head = [
        f"{title}, {int(length):,} tokens"
        for length in lengths
        for title in ("tokens/s", "to stock", "cache in MB", "cache to stock")
    ]
    return markdown(["decoder self-attention", *head], lines) + "\n\n" + provenance(rows)


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


def layers() -> str:
    """One attention block behind each own layer class, relative to its stock module."""
    rows = read(RESULTS / "layers.csv")
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
