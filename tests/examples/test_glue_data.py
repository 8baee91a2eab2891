"""What the GLUE examples read, measure and convert, and bad data in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_glue
import run_glue_no_trainer
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import BertTokenizerFast

from hf_synthesizer.errors import DataError, InvalidConfigError
from hf_synthesizer.glue import data as task_data
from hf_synthesizer.glue.tasks import TASKS, get_task, predictions_of
from hf_synthesizer.patching.layer_text import parse_layers
from shared import glue
from shared.glue import ClassifierConversionArguments, DataArguments, LocalGlueMetric, load_data, load_metric, tokenize
from tests.helpers.glue_rows import GOOD, row_of, write_rows

# ---- metrics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_metrics_equal_those_of_scikit_learn_and_scipy(name: str) -> None:
    task, generator = get_task(name), np.random.default_rng(0)
    if task.regression:
        outputs, labels = generator.normal(size=(40, 1)), generator.normal(size=40).astype(np.float32)
    else:
        outputs, labels = generator.normal(size=(40, task.num_labels)), generator.integers(0, task.num_labels, 40)
    found = predictions_of(task, outputs.astype(np.float32))
    expected = {
        "accuracy": lambda: accuracy_score(labels, found),
        "f1": lambda: f1_score(labels, found, average="macro" if name == "cb" else "binary"),
        "matthews_correlation": lambda: matthews_corrcoef(labels, found),
        "pearson": lambda: pearsonr(found, labels)[0],
        "spearmanr": lambda: spearmanr(found, labels)[0],
    }
    computed = load_metric(task, network=False).compute(predictions=found, references=labels)
    assert computed == pytest.approx({metric: expected[metric]() for metric in task.metrics}, abs=1e-6)
    assert task.score(computed) == pytest.approx(np.mean(list(computed.values())))


def test_a_metric_that_the_hub_does_not_give_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("evaluate.load", unreachable)
    assert isinstance(load_metric(get_task("mrpc")), LocalGlueMetric)


def test_the_official_metrics_are_used_where_the_hub_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("evaluate.load", lambda *names, **kwargs: asked.append(names))
    load_metric(get_task("mrpc"))
    load_metric(get_task("cb"))
    assert asked == [("glue", "mrpc"), ("super_glue", "cb")]


# ---- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_read_and_tokenized(name: str, glue_dir: Path, model_dir: Path) -> None:
    arguments = DataArguments(task_name=name, glue_dir=str(glue_dir), max_length=16, max_train_samples=9)
    task, rows = load_data(arguments)
    assert {"train", *task.validation} <= set(rows) and len(rows["train"]) == 9
    tokenizer = BertTokenizerFast.from_pretrained(model_dir)
    encoded = tokenize(task, rows["train"], tokenizer, arguments)
    batch = glue.collator(task, tokenizer, arguments)([encoded[number] for number in range(4)])
    assert batch["input_ids"].shape[0] == 4 and batch["input_ids"].shape[-1] <= 16
    assert batch["input_ids"].dim() == (3 if task.multiple_choice else 2)
    assert batch["labels"].tolist() == pytest.approx([row_of(task, n, "", "")["label"] for n in range(4)])


def test_the_second_text_stands_at_its_place_where_there_is_room(glue_dir: Path, model_dir: Path) -> None:
    tokenizer = BertTokenizerFast.from_pretrained(model_dir)
    plain = DataArguments(task_name="mrpc", glue_dir=str(glue_dir), max_length=20)
    task, rows = load_data(plain)
    expected = tokenize(task, rows["train"], tokenizer, plain)
    for full in (False, True):
        arguments = replace(plain, second_text_at=9, pad_to_max_length=full)
        for row, other in zip(tokenize(task, rows["train"], tokenizer, arguments), expected, strict=True):
            place = 9 if other["token_type_ids"].index(1) < 9 else other["token_type_ids"].index(1)
            place = min(place, other["token_type_ids"].index(1) + 20 - len(other["input_ids"]))
            assert row["token_type_ids"].index(1) == place and row["input_ids"][place - 1] == tokenizer.sep_token_id
            kept = [number for number, seen in enumerate(row["attention_mask"]) if seen]
            for name in ("input_ids", "token_type_ids"):
                assert [row[name][number] for number in kept] == other[name]
            assert len(row["input_ids"]) == (20 if full else kept[-1] + 1)


@pytest.mark.parametrize("name", ["mrpc", "sst2", "copa"])
@pytest.mark.parametrize("pad", [False, True], ids=["ragged", "padded"])
def test_the_text_of_a_transfer_is_made_up_and_arranged_like_the_data(
    name: str, pad: bool, glue_dir: Path, model_dir: Path
) -> None:
    tokenizer = BertTokenizerFast.from_pretrained(model_dir)
    arguments = DataArguments(
        task_name=name, glue_dir=str(glue_dir), max_length=24, second_text_at=10, pad_to_max_length=pad
    )
    task, rows = load_data(arguments)
    encoded = tokenize(task, rows["train"], tokenizer, arguments)
    conversion = ClassifierConversionArguments("random", transfer_steps=80, transfer_answers=40, transfer_batch_size=2)
    found = glue.transfer_text(encoded, conversion, arguments, tokenizer, 0)
    assert len(found) == 240 and all("labels" not in row for row in found)
    batch = glue.collator(task, tokenizer, arguments)(found[:50])
    assert batch["input_ids"].shape[-1] == 24 if pad else batch["input_ids"].shape[-1] <= 24
    if name == "mrpc":
        places = [row["token_type_ids"].index(1) for row in found if len(row["input_ids"]) < 24 or pad]
        assert places.count(10) > 0.8 * len(places)
    real = {str(row["input_ids"]) for row in encoded}
    new = sum(str(row["input_ids"]) not in real for row in found)
    assert new == 0 if name == "copa" else new > 120


def test_the_hub_comes_first_and_a_local_folder_second(monkeypatch: pytest.MonkeyPatch, glue_dir: Path) -> None:
    asked = []

    def unreachable(*args, **kwargs):
        asked.append(args)
        raise ConnectionError("no network")

    monkeypatch.delenv("GLUE_DIR", raising=False)
    monkeypatch.setattr(task_data, "load_dataset", unreachable)
    monkeypatch.setattr(glue, "BESIDE_THE_REPOSITORY", glue_dir / "missing")
    with pytest.raises(DataError, match="--glue_dir"):
        load_data(DataArguments(task_name="mrpc"))
    assert asked == [("nyu-mll/glue", "mrpc")]


def test_own_files_name_their_classes(tmp_path: Path) -> None:
    rows = [{"text": "good film", "label": "yes"}, {"text": "bad film", "label": "no"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.csv").write_text("text,label\nbad,no\n")
    task, splits = load_data(DataArguments(train_file=str(path), validation_file=str(tmp_path / "rows.csv")))
    assert task.labels == ("no", "yes") and task.fields == ("text",)
    assert splits["train"]["label"][:] == [1, 0] and splits["validation"]["label"][:] == [0]


BAD_FILES = {
    "missing column": ([{"sentence1": "good", "label": 1}], "no column 'sentence2'"),
    "missing label": ([{"sentence1": "good", "sentence2": "bad"}], "no column 'label'"),
    "label out of range": (
        [GOOD, {**GOOD, "label": 2}],
        "Row 1 of the train data has the label 2: mrpc has the class",
    ),
    "negative label": ([{**GOOD, "label": -1}], "has the label -1"),
    "wrong label": ([{**GOOD, "label": "maybe"}], "'maybe': the classes are not_equivalent, equivalent"),
    "no label": ([GOOD, {**GOOD, "label": None}], "Row 1 of the train data has the label None"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_rows_are_one_clear_sentence(kind: str, tmp_path: Path) -> None:
    rows, message = BAD_FILES[kind]
    path = write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError, match=message) as caught:
        load_data(DataArguments(task_name="mrpc", train_file=str(path), validation_file=str(path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "train.jsonl", "is empty"),
        ("\n\n", "train.csv", "is empty"),
        ("sentence1,sentence2,label\n", "train.csv", "has no rows|cannot be read"),
        ("{not json", "train.jsonl", "cannot be read as json"),
        ("x", "train.txt", "ends in '.txt': csv, json, jsonl and parquet"),
    ],
)
def test_bad_files_are_one_clear_sentence(content: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_data(DataArguments(task_name="mrpc", train_file=str(tmp_path / name)))


def test_other_bad_input_is_one_clear_sentence(tmp_path: Path, glue_dir: Path) -> None:
    with pytest.raises(DataError, match="Unknown task 'mrcp': .* Did you mean 'mrpc'"):
        load_data(DataArguments(task_name="mrcp"))
    with pytest.raises(DataError, match="does not exist"):
        load_data(DataArguments(task_name="mrpc", train_file=str(tmp_path / "no.csv")))
    with pytest.raises(DataError, match="holds no folder 'mrpc'"):
        load_data(DataArguments(task_name="mrpc", glue_dir=str(tmp_path)))
    with pytest.raises(DataError, match="Name the data"):
        load_data(DataArguments())
    tokenizer = SimpleNamespace(sep_token_id=None, pad_token_id=0, pad_token_type_id=0)
    with pytest.raises(DataError, match="a token between two texts"):
        glue.arrange({"input_ids": [1, 2]}, tokenizer, DataArguments(second_text_at=9))
    path = write_rows(tmp_path / "stsb.jsonl", [{**GOOD, "label": 7.5}])
    with pytest.raises(DataError, match="7.5: stsb has scores from 0 to 5"):
        load_data(DataArguments(task_name="stsb", train_file=str(path)))


# ---- conversion -------------------------------------------------------------------------------------------------


def test_layers_on_the_command_line() -> None:
    assert parse_layers("0-2,5") == [0, 1, 2, 5] and parse_layers(None) is None
    assert parse_layers("encoder,decoder.0-1,decoder.3") == {"encoder": True, "decoder": [0, 1, 3]}
    with pytest.raises(ValueError, match="indices and ranges"):
        parse_layers("0-x")


def test_a_model_stays_stock_without_a_variant(model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    flags = [f"--model_name_or_path={model_dir}", "--task_name=mrpc", f"--glue_dir={glue_dir}", "--max_length=16"]
    run_glue.main([*flags, f"--output_dir={tmp_path}", "--do_train", "--max_steps=1", "--local_metrics", "--use_cpu"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "bert" and "synthesizer" not in config


@pytest.mark.parametrize("script", [run_glue, run_glue_no_trainer])
def test_conversion_flags_need_a_variant(script: Any, model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    flags = [f"--model_name_or_path={model_dir}", "--task_name=mrpc", f"--glue_dir={glue_dir}", "--max_length=16"]
    for more, message in (
        (["--layers=0"], "--layers says how to swap attention, so it needs --variant"),
        (["--transfer_steps=9"], "--transfer_steps says how to swap attention, so it needs --variant"),
        (
            ["--variant=random", "--transfer_method=average", "--transfer_steps=9"],
            "average is a closed form and takes no steps",
        ),
        (["--variant=random", "--transfer_variation=2"], "--transfer_variation is a share"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            script.main([*flags, f"--output_dir={tmp_path / 'out'}", *more])
        assert not (tmp_path / "out").exists()
