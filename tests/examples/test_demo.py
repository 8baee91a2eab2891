"""The demo from end to end, on a tiny model and a few rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import demo
import pytest
import torch
from transformers import BertModel, BertTokenizerFast

from hf_synthesizer.errors import DataError
from shared import snippets
from tests.helpers.models import bert_config


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    words = sorted({word.strip(".,").lower() for sentence in demo.SENTENCES for word in sentence.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *words]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(bert_config(vocab_size=len(vocabulary))).save_pretrained(folder)
    return folder


def test_the_demo_trains_saves_reloads_and_predicts(model_dir: Path, tmp_path: Path) -> None:
    """Into a log file, where it draws no progress bars."""
    rows = [{"sentence": sentence, "label": number % 2} for number, sentence in enumerate(demo.SENTENCES * 4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, demo.__file__, "--quick", f"--model={model_dir}", f"--train_file={path}", f"--validation_file={path}",
         f"--output_dir={output}", "--max_length=24", "--variants=random,dense+salience"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stdout + done.stderr and "\r" not in done.stderr
    table = json.loads((output / "results.json").read_text())
    expected = ["stock"] + [f"{v}, {how}" for v in ("random", "dense+salience") for how in ("fresh", "transferred")]
    assert [row["model"] for row in table] == expected
    assert all(0 <= row["score"] <= 1 and row["examples_per_second"] > 0 for row in table)
    assert (output / "attention.png").stat().st_size > 1000
    assert "toothpaste" in (output / "attention.html").read_text(encoding="utf-8")
    assert json.loads((output / "dense-salience" / "config.json").read_text())["model_type"] == "synthesizer_bert"
    assert "the same probabilities in both processes" in done.stdout and "examples/s" in done.stdout


def test_snippets_are_read_from_the_source_distribution(tmp_path: Path) -> None:
    lines = [f"{number}\t{mean}\tsnippet {number}\r\n" for number, mean in enumerate([3.5, -2.0, 0.1, 0.5] * 300)]
    (tmp_path / snippets.FILE).write_bytes("".join(lines).encode())
    inner, outer = tmp_path / "hutto_ICWSM_2014.tar.gz", tmp_path / "vaderSentiment-3.3.2.tar.gz"
    with tarfile.open(inner, "w:gz") as archive:
        archive.add(tmp_path / snippets.FILE, f"hutto_ICWSM_2014/{snippets.FILE}")
    with tarfile.open(outer, "w:gz") as archive:
        archive.add(inner, f"vaderSentiment-3.3.2/{snippets.INNER}")
    assert snippets.read(outer)[:2] == [("snippet 0", 3.5), ("snippet 1", -2.0)]
    train, validation = snippets.write_splits(tmp_path)
    rows = [json.loads(line) for path in (train, validation) for line in path.read_text().splitlines()]
    assert len(rows) == 900 and {row["label"] for row in rows} == {0, 1}  # neutral ones are left out


def test_text_that_cannot_be_downloaded_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "PACKAGE", str(tmp_path / "missing.tar.gz"))
    with pytest.raises(DataError, match="pip could not download"):
        snippets.download(tmp_path)
