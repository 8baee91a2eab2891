"""The tables of docs/scaling.md, from what `benchmarks/scaling/costs.py` and `distributed.py` wrote.

    python -m benchmarks.report.scaling          # writes them into the document
    python -m benchmarks.report.scaling --check  # only says whether document and results agree

`<!-- table: gpus (benchmarks/report/scaling.py) -->` … `<!-- end of table -->` is where the table `gpus` goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from benchmarks.measurements.records import RESULTS, ROOT, read
from benchmarks.report.table_places import parser_of, write_tables
from benchmarks.report.table_text import markdown
from benchmarks.scaling.costs import ACCELERATORS, LENGTHS, MODELS, RESULT, STOCK, VARIANTS, Cost

DOCUMENT = ROOT / "docs" / "scaling.md"


def costs() -> list[Cost]:
    """The lines of the file."""
    kinds = get_type_hints(Cost)
    return [Cost(**{name: kinds[name](text) for name, text in row.items()}) for row in read(RESULT)]


def short(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def lengths() -> list[str]:
    return [f"{length // 1024}k" if length >= 1024 else str(length) for length in LENGTHS]


def table(costs: list[Cost], cell: Callable[[Cost, Cost], str], **conditions: Any) -> str:
    """A line for each variant, a column for each length; `cell` sees a cost and that of stock."""
    chosen = [found for found in costs if all(getattr(found, name) == value for name, value in conditions.items())]
    known = {(found.variant, found.length): found for found in chosen}
    lines = [
        [variant, *(cell(known[variant, length], known[STOCK, length]) for length in LENGTHS)] for variant in VARIANTS
    ]
    return markdown(["attention", *lengths()], lines)


def faster(found: Cost, stock: Cost) -> str:
    """Stock's time over this one's; stock's own in milliseconds."""
    return f"{found.h100_ms:.3g} ms" if found is stock else f"{stock.h100_ms / found.h100_ms:.2f}"


def tables(costs: list[Cost]) -> dict[str, str]:
    by_name = {model.name: model for model in MODELS}

    def whole(found: Cost, stock: Cost) -> str:
        return short(found.parameters * by_name[found.model].layers)

    made = {"gpus": markdown(
        ["GPU", "bfloat16 TFLOP/s", "TB/s"], [[g.name, f"{g.flops / 1e12:.0f}", f"{g.bandwidth / 1e12:.2f}"] for g in ACCELERATORS]
    )}  # fmt: skip
    for model in MODELS:
        name = model.name.split("-")[0].lower()
        same = {"model": model.name, "batch": 1, "parallel": 1}
        made[f"{name}-parameters"] = table(costs, whole, **same)
        made[f"{name}-one"] = table(costs, faster, **same)
        made[f"{name}-batch"] = table(costs, faster, **{**same, "batch": 16})
        if model.heads % 8 == 0:
            made[f"{name}-parallel"] = table(costs, faster, model=model.name, batch=16, parallel=8)
    first = [found for found in costs if (found.length, found.batch, found.parallel) == (LENGTHS[0], 1, 1)]
    made["cache"] = markdown(
        ["attention", *(model.name for model in MODELS), "launches a layer"],
        [
            [
                variant,
                *(short(found.cache_bytes) for found in first if found.variant == variant),
                next(str(found.launches) for found in first if found.variant == variant),
            ]
            for variant in VARIANTS
        ],
    )
    rows = [
        [row["how"], f"{row['package']} {row['version']}", row["carries"], row["largest_difference"]]
        for row in read(RESULTS / "settings.csv")
    ]
    made["settings"] = markdown(["setting", "version", "carries", "losses differ by"], rows)
    return made


def main(argv: list[str] | None = None) -> None:
    """Write the tables, or check them."""
    check = parser_of(__doc__).parse_args(argv).check
    made = tables(costs())
    write_tables([DOCUMENT], "scaling", {name: lambda text=text: text for name, text in made.items()}, check=check)


if __name__ == "__main__":
    main()
