"""docs/scaling.md is what its script makes of real configurations, and its count of products is that of the routes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.report import scaling as report
from benchmarks.scaling import costs as scaling
from hf_synthesizer.attend import attend


def test_the_file_and_the_page_are_what_the_scripts_write() -> None:
    scaling.main(["--check"])
    report.main(["--check"])


@pytest.mark.parametrize("variant", ["dense", "factorized_dense", "random", "factorized_random"])
def test_products_are_counted_as_the_routes_make_them(variant: str) -> None:
    model, length, rows = scaling.MODELS[0], 256, 2
    synthesizer = scaling.patched(model, variant, length).synthesizer
    with torch.device("meta"):
        hidden = torch.empty(rows, length, model.hidden)
        value = torch.empty(rows, model.heads, length, model.head_dim)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        attend(synthesizer(hidden), value)
    part = scaling.part_of(model, variant, length)
    values = 2 * rows * model.heads * length**2 * model.head_dim
    assert counter.get_total_flops() == rows * part.flops + part.flops_fixed + values


def test_stock_has_the_parameters_that_transformers_gives_it() -> None:
    with torch.device("meta"):
        for model in scaling.MODELS:
            stock = model.build(model.config)
            projections = [
                module
                for name, module in stock.named_modules()
                if name.rpartition(".")[2] in ("query", "key", "q", "k", "q_proj", "k_proj")
            ]
            assert scaling.part_of(model, "stock", 512).parameters == sum(m.weight.numel() for m in projections)
