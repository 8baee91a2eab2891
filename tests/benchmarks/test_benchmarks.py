"""The benchmarks: each script runs, goes on where it stopped, and the documents say what the results say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.block import attention, blocks, long_sequences, memory
from benchmarks.measurements import devices, grid, records
from benchmarks.report import block_bars, long_tables, plots, tables
from benchmarks.report.table_places import table_names
from benchmarks.sparse import growth
from hf_synthesizer import list_variants
from hf_synthesizer.measuring import timing
from tests.helpers.benchmark_runs import BENCHMARKS, ROOT, lines, run

PROVENANCE = ("cpu", "cores", "threads", "torch", "transformers", "hf_synthesizer", "commit", "date")
SCRIPTS = {
    "block.attention": {"stock sdpa", "stock eager", "floor", "random", "dense+salience", "fnet", "linformer"},
    "model.speed": {"stock sdpa", "dense"},
    "model.decode": {"stock sdpa", "dense+salience"},
    "model.cache_growth": {"stock sdpa", "3/4 in windows of 64", "1/2 in windows of 64 and 1/4 relative"},
    "block.memory": {"stock sdpa", "random"},
    "block.long_sequences": {"relative", "dot_product (window 128)", "random"},
    "block.compression": {
        "stock sdpa",
        "factorized_random",
        "factorized_random (fused)",
        "factorized_random (tolerance 0.1)",
        "factorized_random (tolerance 0.01)",
    },
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_measures_every_variant_with_machine_and_versions(script: str, tmp_path: Path) -> None:
    output = tmp_path / "results.csv"
    done = run(script, "--quick", "--output", output)
    assert done.returncode == 0, done.stderr
    rows = lines(output)
    assert {row["variant"] for row in rows} == SCRIPTS[script]
    for row in rows:
        assert row["status"] == "ok" or row["reason"] == "Fourier mixing takes no mask"
        assert all(row[name] for name in PROVENANCE)
        if row["status"] == "ok" and script != "block.memory":
            assert 0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
            assert float(row["speedup"]) == pytest.approx(
                float(row["stock_sdpa_ms"]) / float(row["median_ms"]), rel=0.05
            )
    assert "100%" in done.stderr  # the progress bar


def test_the_account_names_the_machine_its_peak_and_each_form_s_own_floor(tmp_path: Path) -> None:
    output = tmp_path / "results.csv"
    options = ("--lengths", 32, "--batch_sizes", 1, "--modes", "inference", "--padding", "none", "--dtypes", "float32")
    done = run("block.attention", *options, "--repeats", 3, "--variants", "random,dense,fnet", "--output", output)
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in lines(output)}
    assert all(row["cpu"] and row["instruction_set"] and row["threads"] == "1" for row in rows.values())
    assert "GFLOP/s" in done.stdout and rows["dense"]["cpu"] in done.stdout and "exponentials" in done.stdout
    for name in ("random", "dense"):
        row = rows[name]
        own, floor, peak = (float(row[column]) for column in ("median_ms", "own_floor_ms", "peak_gflops"))
        assert float(row["share_of_own_floor"]) == pytest.approx(floor / own, abs=0.002)
        assert float(row["same_library_speedup"]) == pytest.approx(float(row["same_library_ms"]) / own, rel=0.01)
        assert float(row["share_of_floor"]) > 0 and peak > 1
    assert float(rows["dense"]["own_floor_ms"]) > float(rows["random"]["own_floor_ms"])
    assert not rows["fnet"]["own_floor_ms"]  # no form of ours


def test_a_record_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model name\t: A\ncpu family\t: 25\nmodel\t\t: 17\n\nmodel name\t: B\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert records.processor() == "A (family 25, model 17)"


def test_lines_of_another_processor_stay_beside_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {name: "x" for name in records.KEY}
    results = records.Results(tmp_path / "results.csv", ("status",))
    results.add({**row, "status": "ok"})
    assert results.has(row)
    other = {**records.provenance(), "cpu": "another"}
    monkeypatch.setattr(records, "provenance", lambda: other)
    again = records.Results(tmp_path / "results.csv", ("status",))
    assert not again.has(row)
    again.add({**row, "status": "ok"})
    assert len(lines(tmp_path / "results.csv")) == 2
    again.add({**row, "status": "ok"})
    assert len(lines(tmp_path / "results.csv")) == 2


def test_a_checkout_is_timed_against_another_one(tmp_path: Path) -> None:
    done = run("block.before_after", str(ROOT), "--quick", "--output", tmp_path / "before_after.csv")
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "before_after.csv")
    assert [row["variant"] for row in rows] == ["random", "dense"]
    assert all(float(row["median_ms"]) > 0 and float(row["before_ms"]) > 0 and row["before_commit"] for row in rows)


def test_the_startup_benchmark_times_what_users_wait_for(tmp_path: Path) -> None:
    done = run("model.startup", "--quick", "--output", tmp_path / "startup.csv")
    assert done.returncode == 0, done.stderr
    found = {row["mode"]: float(row["median_ms"]) for row in lines(tmp_path / "startup.csv")}
    assert {
        "import, alone",
        "import",
        "patch",
        "first forward",
        "second forward",
        "stock first forward",
        "kernels",
    } <= set(found)
    assert all(milliseconds > 0 for milliseconds in found.values())


def test_explore_runs_every_experiment(tmp_path: Path) -> None:
    done = run("block.explore", "--quick", "--output", tmp_path / "explore.csv")
    assert done.returncode == 0, done.stderr
    assert len({row["model"] for row in lines(tmp_path / "explore.csv")}) == 13


def test_what_is_in_the_file_is_measured_again_only_when_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[str]] = []
    spread = timing.Spread(2.0, 1.0, 3.0, 3)

    def measure(cell: Any, variants: list[str], rounds: int, seconds: float) -> list[tuple[str, Any, Any]]:
        measured.append(variants)
        return [(name, "no memory" if name == "dense" else spread, spread) for name in variants]

    monkeypatch.setattr(attention, "measure_cell", measure)
    options = ["--lengths", "16", "--batch_sizes", "1", "--modes", "inference", "--padding", "none"]
    options += ["--dtypes", "float32", "--output", str(tmp_path / "results.csv"), "--variants"]
    attention.main([*options, "random,dense"])
    attention.main([*options, "random,dense,salience"])
    attention.main([*options, "random,salience", "--force"])
    assert measured == [["random", "dense"], ["dense", "salience"], ["random", "salience"]]
    assert [row["variant"] for row in lines(tmp_path / "results.csv")] == ["random", "dense", "salience"]
    assert grid.TIMING_FIELDS[0] == "status"


def test_a_variant_that_would_not_fit_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "available_memory", lambda device: 1 << 20)
    monkeypatch.setattr(attention, "estimated_bytes", lambda name, *rest: 1 << (21 if name == "dense" else 0))
    cell = grid.Cell("inference", "none", "float32", 0.0, 16, 1)
    found = {name: out for name, out, *_ in attention.measure_cell(cell, ["random", "dense"], 3, 0.0)}
    assert found["dense"] == "would need about 0.0 GiB, 0.0 GiB are free"
    assert found["random"].rounds == 3


def test_candidates_take_turns() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    spreads = timing.interleaved(runs, rounds=3, seconds=60)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(spread.rounds == 3 for spread in spreads.values())


@pytest.mark.parametrize("script", ["block.attention", "model.speed", "block.memory"])
def test_a_device_that_is_not_there_is_named(script: str, tmp_path: Path) -> None:
    device = "xpu" if not torch.xpu.is_available() else "mps"
    done = run(script, "--quick", "--device", device, "--output", tmp_path / "results.csv")
    assert done.returncode and f"--device {device}: this torch" in done.stderr and "Traceback" not in done.stderr


def test_another_device_is_waited_for_and_counts_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module like `torch.cuda` stands in for one: it says when it was waited for, and what its tensors held."""
    calls: list[str] = []

    class Device:
        synchronize = staticmethod(lambda: calls.append("wait"))
        empty_cache = reset_peak_memory_stats = staticmethod(lambda: calls.append("reset"))
        get_device_name = staticmethod(lambda: "a GPU")
        mem_get_info = staticmethod(lambda: (1 << 40, 1 << 40))
        memory_allocated = staticmethod(lambda: 3_000_000)
        max_memory_allocated = staticmethod(lambda: 8_000_000)

    monkeypatch.setattr(devices, "module", lambda device: Device)
    monkeypatch.setattr(devices, "require", lambda device: None)
    cell = grid.Cell("train", "none", "float32", 0.0, 16, 1, "cuda")
    assert cell.row("attention", "block", "random")["device"] == "cuda: a GPU"
    arguments = grid.parser("", "x.csv", ()).parse_args(["--output", str(tmp_path / "x.csv")])
    arguments.device = "cuda"
    assert grid.results(arguments, ()).path.name == "x-cuda.csv"
    runs = {"a": lambda: calls.append("run")}
    timing.interleaved(runs, 3, 60, wait=lambda: devices.wait("cuda"))
    assert calls[-3:] == ["wait", "run", "wait"]
    assert memory.peak_of(lambda: calls.append("run"), "cuda") == 5_000_000
    assert calls[-5:] == ["wait", "reset", "reset", "run", "wait"]


def test_a_disturbed_measurement_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.9, 0.4, 0.1, 0.0])

    class Bystanders:
        def cores(self) -> float:
            return next(busy)

    monkeypatch.setattr(grid, "Bystanders", Bystanders)
    arguments = grid.parser("", "x.csv", ()).parse_args(["--max_others", "0.2"])
    numbers = iter(range(9))
    assert grid.undisturbed(lambda: next(numbers), arguments) == (2, 0.1)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "train"])
def test_every_block_keeps_the_shape(train: bool) -> None:
    hidden_states = torch.randn(2, 64, blocks.WIDTH)
    kept = blocks.keep(2, 64)
    assert kept.sum(1).tolist() == [63, 48]
    for name in dict.fromkeys((*blocks.BLOCKS, *long_sequences.VARIANTS)):
        if train and name.endswith("(fused)"):
            with pytest.raises(blocks.NotServed, match="cannot be trained"):
                blocks.build(name, 64, torch.float32, train=True)
            continue
        mask = None if name == "fnet" else blocks.mask_for(name, kept, hidden_states)
        with torch.set_grad_enabled(train):
            output = blocks.build(name, 64, torch.float32, train=train)(hidden_states, mask)
        assert output.shape == hidden_states.shape
        assert output.requires_grad == (train and name != "fnet")


def test_the_documents_say_what_the_results_say() -> None:
    for document in tables.DOCUMENTS:
        assert table_names(document.read_text(encoding="utf-8"), "tables"), f"{document.name} has no table"
    tables.main(["--check"])


def test_what_is_missed_of_what_was_asked_is_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"cpu": "A", "held_to": "", "mode": "inference", "padding": "none", "dtype": "float32", "dropout": "0.0"}
    here |= {"length": "512", "batch_size": "8", "status": "ok", "same_library_speedup": "1.06"}
    rows = [
        {**here, "variant": name, "share_of_floor": share} for name, share in (("random", "0.915"), ("dense", "2"))
    ]
    ragged = [{**row, "padding": "ragged", "same_library_speedup": "0.94"} for row in rows]
    monkeypatch.setattr(block_bars, "attention_rows", lambda: rows + ragged)
    monkeypatch.setattr(block_bars, "provenance", lambda rows: f"{len(rows)} cells")
    lines = {
        line.split(" | ")[0]: line.split(" | ")[3] for line in block_bars.bars().splitlines() if line.startswith("| `")
    }
    assert lines == {
        "| `random`": "0.92 / 0.92",  # of the floor, as it is written
        "| `dense`": "1.06 / 1.05",  # to stock
        "| `random`, ragged": "0.92 / 0.83",
        "| `dense`, ragged": "**0.94 / 0.95**",
    }


def test_bars_of_long_sequences_are_met_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_tables, "FILE", tmp_path / "long_sequences.csv")
    assert long_tables.long_bars() == long_tables.long_sequences() == long_tables.NOT_YET
    monkeypatch.setattr(long_tables, "provenance", lambda rows: f"{len(rows)} lines")
    here = {"cpu": "A", "held_to": "", "threads": "2", "status": "ok", "dtype": "float32", "mode": "inference"}
    lines_of = [
        ("relative", 512, 1.0, 1.3, ""),
        ("random", 512, 0.9, 1.4, ""),
        ("relative", 2048, 4.0, 3.99, ""),
        ("relative", 32768, 64.0, 41.2, 130.0),
        ("weights of width one", 32768, 60.0, 44.0, 100.0),
    ]
    rows = [
        {**here, "variant": name, "length": str(length), "median_ms": str(ms), "same_library_speedup": str(times)}
        | {"peak_mb": str(peak)}
        for name, length, ms, times, peak in lines_of
    ]
    other = {**rows[2], "threads": "4", "same_library_speedup": "9"}
    monkeypatch.setattr(long_tables, "read", lambda path: [*rows, other])
    found = dict(re.findall(r"^\| (`relative`.*?) \| .*? \| (.*) \|$", long_tables.long_bars(), re.MULTILINE))
    assert found == {
        "`relative`, inference, 2,048 tokens, times as fast as stock": "3.99 | **missed**",
        "`relative`, inference, 8,192 tokens, times as fast as stock": "not measured | ",
        "`relative`, inference, 32,768 tokens, times as fast as stock": "41.2 | met",
        "`relative`, training, 2,048 tokens, times as fast as stock": "not measured | ",
        "`relative`, training, 8,192 tokens, times as fast as stock": "not measured | ",
        "`relative`, exponent of the growth from 2,048 to 32,768 tokens": "1 | met",
        "`relative`, peak memory at 32,768 tokens, to weights of width one": "1.3 | **missed**",
        "`relative`, inference, 512 tokens, times as fast as `random`": "0.9 | **missed**",
    }
    assert "| relative | 1.30 | 3.99 | 41.20 | 1.00 | 1.30 |" in long_tables.long_sequences()


def test_the_plots_are_drawn_from_the_results(tmp_path: Path) -> None:
    for file in ("attention", "memory", "decode"):
        source = BENCHMARKS / "results" / f"{file}.csv"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    plots.main(["--results", str(tmp_path)])
    for name in ("speed-inference-none-float32", "speed-few", "cache"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_recall_of_random_queries_rises_with_the_hashes(tmp_path: Path) -> None:
    options = ("--length", 64, "--sequences", 1, "--hashes", 1, 4, "--seeds", 1, "--output", tmp_path / "recall.csv")
    done = run("sparse.recall", *options)
    assert done.returncode == 0, done.stderr
    found = {(row["variant"], row["hashes"]): float(row["recall"]) for row in lines(tmp_path / "recall.csv")}
    assert len(found) == 13 and all(row["commit"] for row in lines(tmp_path / "recall.csv"))
    for variant, hashes in found:
        if hashes == "4":
            assert 1 >= found[variant, "4"] > found[variant, "1"] > 0.5


def test_growth_is_the_slope_of_the_logarithms() -> None:
    assert growth.slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)


def test_what_the_results_say_of_long_sequences() -> None:
    """At 4096 tokens: faster than stock eager, smaller than stock SDPA with its mask, and growing less than quadratically."""
    rows = [row for row in lines(BENCHMARKS / "results" / "growth.csv") if not row["variant"].startswith("stock")]
    assert {row["variant"] for row in rows} >= {"sparse_strided", "sparse_fixed", "lsh_simple", "alsh_sign"}
    for row in rows:
        assert float(row["ms_4096"]) < float(row["stock_eager_ms"]) and float(row["exponent"]) < 2
        if row["padding"] == "ragged":
            assert float(row["total_mb"]) < float(row["stock_sdpa_total_mb"])


def test_compare_mechanisms_measures_all(tmp_path: Path) -> None:
    example = BENCHMARKS.parent / "examples" / "compare_mechanisms.py"
    command = [sys.executable, str(example), "--quick", "--output", str(tmp_path / "plot.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.split()}
    for name in ("stock", *list_variants()):
        assert len(table[name]) == 7, table[name]
    assert table["stock"][-1] == table["dot_product"][-1] == "1.00"
    assert "100%" in done.stderr and (tmp_path / "plot.png").stat().st_size > 5_000
