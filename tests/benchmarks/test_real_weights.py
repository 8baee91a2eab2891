"""The benchmarks of real weights and of layer classes: they run, on tiny models by default and on real ones where they are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTModel

from benchmarks.block import layers
from hf_synthesizer import patch_model
from hf_synthesizer.layers.finding.layer_classes import LAYER_CLASSES
from tests.helpers.benchmark_runs import lines, run

FOLDERS = ("HF_SYNTHESIZER_WEIGHTS", "HF_SYNTHESIZER_DATA")


def test_weights_in_a_folder_are_measured(model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "minilm").symlink_to(model_dir)
    (tmp_path / "glue").symlink_to(glue_dir)
    done = run(
        "pretrained.real_weights",
        "--weights",
        tmp_path,
        "--data",
        tmp_path,
        "--output",
        tmp_path / "found.csv",
        "--quick",
    )
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "found.csv")
    assert {(row["variant"], row["mode"]) for row in rows} == {
        ("random+dot_product", "all"),
        *((variant, share) for variant in ("random", "random (fresh)") for share in ("quarter", "half", "all")),
        *(("random+salience", share) for share in ("quarter", "half", "all")),
    }
    assert all(row["status"] == "ok" and row["model_class"] == "BertModel" and row["commit"] for row in rows)
    assert float(rows[0]["difference"]) < 1e-4


def test_a_folder_without_weights_is_named() -> None:
    done = run("pretrained.real_weights", "--data", ".", HF_SYNTHESIZER_WEIGHTS="nowhere")
    assert done.returncode != 0 and "--weights nowhere has none of the folders minilm" in done.stderr


@pytest.mark.data
def test_mixtures_of_real_weights_equal_stock_and_closed_forms_keep_more_than_a_fresh_start(tmp_path: Path) -> None:
    """On the weights and the text that HF_SYNTHESIZER_WEIGHTS and HF_SYNTHESIZER_DATA name."""
    missing = [name for name in FOLDERS if name not in os.environ]
    assert not missing, f"Set {', '.join(missing)}: see docs/real_weights.md."
    done = run("pretrained.real_weights", "--output", tmp_path / "found.csv", "--quick")
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "found.csv")
    mixtures = [row for row in rows if row["difference"]]
    assert mixtures and all(float(row["difference"]) < 1e-4 * max(1.0, float(row["largest"])) for row in mixtures)
    score = {(row["model"], row["variant"], row["mode"]): row["score"] for row in rows}
    for row in mixtures:
        mode = "all" if row["of_layers"] == "1" else "quarter"
        if row["more_is_better"] == "False":  # a few sentences order nothing
            kept, fresh = (float(score[row["model"], name, mode]) for name in ("random", "random (fresh)"))
            assert kept < fresh, row["model"]


def test_a_quick_run_measures_every_layer_class(tmp_path: Path) -> None:
    output = tmp_path / "layers.csv"
    done = run("block.layers", "--quick", "--modes", "inference", "--output", output)
    assert done.returncode == 0, done.stderr
    rows = lines(output)
    assert {row["variant"] for row in rows} == {"stock sdpa", "random", "dense"}
    for row in rows:
        assert row["status"] == "ok" or row["reason"] == "images have no padding", row
        assert row["status"] != "ok" or float(row["speedup"]) > 0


def test_every_registered_layer_class_has_a_block() -> None:
    own = {
        layer_class.__name__ for layer_class in LAYER_CLASSES if layer_class.__module__.startswith("hf_synthesizer.")
    }
    assert own <= {sample.layer_class for sample in layers.MODELS.values()}


def test_opts_padding_at_minus_one_is_served_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT names −1 as the position of padding, and all other tokens by their index."""
    from hf_synthesizer.attend import ROUTES

    config = OPTConfig(
        hidden_size=24, ffn_dim=32, num_hidden_layers=1, num_attention_heads=3, vocab_size=64, word_embed_proj_dim=24,
        max_position_embeddings=16,
    )  # fmt: skip
    model = patch_model(OPTModel(config).eval(), "random", max_length=16)
    ids, keep = torch.randint(3, 64, (3, 8)), torch.ones(3, 8, dtype=torch.long)
    keep[0, 5:] = 0
    keep[2, 7:] = 0
    taken = []
    attention = ROUTES["static"].attention
    counted = ROUTES["static"]._replace(attention=lambda *arguments: taken.append(1) or attention(*arguments))
    monkeypatch.setitem(ROUTES, "static", counted)
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=keep).last_hidden_state
        alone = model(input_ids=ids[:1, :5]).last_hidden_state
    assert len(taken) == 2
    torch.testing.assert_close(padded[:1, :5], alone, rtol=1e-4, atol=1e-5)
