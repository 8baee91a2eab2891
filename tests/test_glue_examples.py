"""The GLUE examples: data, metrics, both scripts, one process and two, resuming, and bad data in one sentence."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, BertModel, BertTokenizerFast

from tests.models import bert_config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from glue import data as glue_data  # noqa: E402
from glue.conversion import ConversionArguments, convert, parse_layers, transfer_text  # noqa: E402
from glue.data import DataArguments, load_data, tokenize  # noqa: E402
from glue.metrics import LocalGlueMetric, load_metric, predictions_of  # noqa: E402
from glue.tasks import TASKS, DataError, get_task  # noqa: E402

run_glue = importlib.import_module("run_glue")
run_glue_no_trainer = importlib.import_module("run_glue_no_trainer")

WORDS = ["good", "bad", "film", "plot", "the", "a", "is", "was", "very", "not", "and", "actor", "scene", ".", "?"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(bert_config(vocab_size=len(VOCABULARY))).save_pretrained(folder)
    return folder


def texts(count: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(3, 9))) for _ in range(count)]


def row_of(task, number: int, first: str, second: str) -> dict:
    fields = dict.fromkeys(task.fields, second) | {task.fields[0]: first}
    if task.name == "copa":
        fields["question"] = "cause" if number % 2 else "effect"
    label = round(number % 11 / 2, 1) if task.regression else number % task.num_labels
    return {**fields, "label": label, "idx": number}


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tasks in the layout of the GLUE archive's copies: 24 rows to train on, 11 to validate on."""
    folder = tmp_path_factory.mktemp("glue")
    for task in TASKS.values():
        (folder / task.name).mkdir()
        tests = [name.replace("validation", "test") for name in task.validation]
        sizes = {"train": 24, **dict.fromkeys(task.validation, 11), **dict.fromkeys(tests, 5)}
        for seed, (split, count) in enumerate(sizes.items()):
            rows = [
                row_of(task, number, first, second)
                for number, (first, second) in enumerate(zip(texts(count, seed), texts(count, seed + 1), strict=True))
            ]
            if split in tests:
                rows = [{**row, "label": -1} for row in rows]
            write_rows(folder / task.name / f"{split}.jsonl", rows)
    return folder


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(model_dir: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        f"--model_name_or_path={model_dir}",
        f"--output_dir={output_dir}",
        "--local_metrics",
        "--max_length=16",
        "--per_device_train_batch_size=8",
        "--learning_rate=1e-3",
        "--num_train_epochs=1",
        *more,
    ]


def trainer_flags(model_dir: Path, output_dir: Path, *more: str) -> list[str]:
    return flags(
        model_dir, output_dir, "--do_train", "--do_eval", "--report_to=none", "--disable_tqdm=True", "--use_cpu", *more
    )


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
    batch = glue_data.collator(task, tokenizer, arguments)([encoded[number] for number in range(4)])
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
    conversion = ConversionArguments("random", transfer_steps=120, transfer_batch_size=2)
    found = transfer_text(encoded, conversion, arguments, tokenizer, 0)
    assert len(found) == 240 and all("labels" not in row for row in found)
    batch = glue_data.collator(task, tokenizer, arguments)(found[:50])
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
    monkeypatch.setattr(glue_data, "load_dataset", unreachable)
    monkeypatch.setattr(glue_data, "BESIDE_THE_REPOSITORY", glue_dir / "missing")
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


GOOD = {"sentence1": "good", "sentence2": "bad", "label": 1}
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
        glue_data.arrange({"input_ids": [1, 2]}, tokenizer, DataArguments(second_text_at=9))
    path = write_rows(tmp_path / "stsb.jsonl", [{**GOOD, "label": 7.5}])
    with pytest.raises(DataError, match="7.5: stsb has scores from 0 to 5"):
        load_data(DataArguments(task_name="stsb", train_file=str(path)))


# ---- conversion -------------------------------------------------------------------------------------------------


def test_layers_on_the_command_line() -> None:
    assert parse_layers("0-2,5") == [0, 1, 2, 5] and parse_layers(None) is None
    with pytest.raises(ValueError, match="indices and ranges"):
        parse_layers("first")


def test_conversion_flags_need_a_variant(model_dir: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(model_dir)
    assert convert(model, ConversionArguments(), max_length=16, dataloader=[]) is model
    with pytest.raises(ValueError, match="--layers says how to swap attention, so it needs --variant"):
        convert(model, ConversionArguments(layers="0"), max_length=16, dataloader=[])
    with pytest.raises(ValueError, match="--transfer_variation is a share"):
        transfer_text(Dataset.from_list([]), ConversionArguments(transfer_variation=2.0), DataArguments(), None, 0)


# ---- run_glue.py ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cola", "stsb", "mnli", "copa", "cb"])
def test_trainer_example(name: str, model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    more = ["--variant=dense+salience", "--transfer_steps=3", "--do_predict"]
    metrics = run_glue.main(trainer_flags(model_dir, tmp_path, f"--task_name={name}", f"--glue_dir={glue_dir}", *more))
    task = get_task(name)
    for split in task.validation:
        suffix = split.removeprefix("validation")
        assert metrics[f"eval{suffix}_samples"] == 11
        assert {f"eval{suffix}_{metric}" for metric in (*task.metrics, "score")} <= set(metrics)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "synthesizer_bert"
    predictions = "predictions_test_matched.tsv" if name == "mnli" else "predictions_test.tsv"
    lines = (tmp_path / predictions).read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 6
    if task.labels:
        assert {line.partition("\t")[2] for line in lines[1:]} <= set(task.labels)


def test_trainer_example_with_a_suggested_hybrid_and_a_teacher(
    model_dir: Path, glue_dir: Path, tmp_path: Path
) -> None:
    run_glue.main(
        trainer_flags(
            model_dir,
            tmp_path,
            "--task_name=mrpc",
            f"--glue_dir={glue_dir}",
            "--variant=random",
            "--layers=suggest",
            "--budget=0.5",
            "--transfer_steps=3",
            f"--teacher={model_dir}",
        )
    )
    layers = json.loads((tmp_path / "config.json").read_text())["synthesizer"]["layers"]["encoder"]
    assert sorted(layers, key=str) == [0, None]


def test_a_resumed_trainer_run_ends_where_an_uninterrupted_one_does(
    model_dir: Path, glue_dir: Path, tmp_path: Path
) -> None:
    def run(folder: str, *more: str) -> dict[str, float]:
        common = ["--task_name=mrpc", f"--glue_dir={glue_dir}", "--variant=dense", "--transfer_steps=3"]
        return run_glue.main(
            trainer_flags(model_dir, tmp_path / folder, *common, "--save_strategy=steps", "--save_steps=2", *more)
        )

    run("whole", "--num_train_epochs=2")
    (tmp_path / "parts").mkdir()
    for name in ("checkpoint-2", "transfer"):
        (tmp_path / "whole" / name).rename(tmp_path / "parts" / name)
    run("parts", "--num_train_epochs=2")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def assert_same_weights(first: Path, second: Path) -> None:
    models = [AutoModelForSequenceClassification.from_pretrained(path).state_dict() for path in (first, second)]
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_command_line_reports_bad_data_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", [{**GOOD, "label": 5}])
    command = [sys.executable, str(EXAMPLES / "run_glue.py"), "--task_name=mrpc", f"--train_file={path}"]
    command += [f"--model_name_or_path={model_dir}", f"--output_dir={tmp_path}", "--do_train"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "error: Row 0 of the train data has the label 5: mrpc has the class ids 0 to 1."
    )
    assert "Traceback" not in done.stderr


# ---- run_glue_no_trainer.py -------------------------------------------------------------------------------------


def test_loop_example_saves_a_model_and_scores(model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    metrics = run_glue_no_trainer.main(
        flags(
            model_dir,
            tmp_path,
            "--task_name=mnli",
            f"--glue_dir={glue_dir}",
            "--variant=random+salience",
            "--transfer_steps=3",
            "--gradient_accumulation_steps=2",
        )
    )
    assert {"eval_matched_score", "eval_mismatched_accuracy", "train_loss"} <= set(metrics)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.model_type == "synthesizer_bert"


@pytest.mark.parametrize("saved", ["step_2", "step_4", "epoch_0"])
def test_a_resumed_loop_ends_where_an_uninterrupted_one_does(
    saved: str, model_dir: Path, glue_dir: Path, tmp_path: Path
) -> None:
    def run(folder: str, *more: str) -> dict[str, float]:
        common = ["--task_name=mrpc", f"--glue_dir={glue_dir}", "--variant=dense", "--num_train_epochs=2"]
        return run_glue_no_trainer.main(flags(model_dir, tmp_path / folder, *common, *more))

    every = "epoch" if saved.startswith("epoch") else "2"
    whole = run("whole", f"--checkpointing_steps={every}")
    parts = run("parts", f"--resume_from_checkpoint={tmp_path / 'whole' / saved}")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert {k: v for k, v in parts.items() if k.startswith("eval")} == pytest.approx(
        {k: v for k, v in whole.items() if k.startswith("eval")}
    )


def test_two_processes_count_every_row_once(model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    """11 validation rows do not split evenly: the metric of two processes must be that of the saved model on all 11."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [str(EXAMPLES / "run_glue_no_trainer.py")]
    command += flags(model_dir, tmp_path, "--task_name=mrpc", f"--glue_dir={glue_dir}", "--variant=dense")
    command += ["--transfer_steps=3", "--per_device_eval_batch_size=4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((tmp_path / "all_results.json").read_text())
    arguments = DataArguments(task_name="mrpc", glue_dir=str(glue_dir), max_length=16)
    task, rows = load_data(arguments)
    tokenizer = BertTokenizerFast.from_pretrained(model_dir)
    encoded = tokenize(task, rows["validation"], tokenizer, arguments)
    batch = glue_data.collator(task, tokenizer, arguments)([encoded[number] for number in range(len(encoded))])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = model(**batch).logits.argmax(-1)
    assert metrics["eval_accuracy"] == pytest.approx(accuracy_score(batch["labels"], found))
    assert metrics["eval_f1"] == pytest.approx(f1_score(batch["labels"], found))


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    expected = {"two_processes_cpu": "MULTI_CPU", "fsdp": "FSDP", "deepspeed_zero2": "DEEPSPEED"}
    assert load_config_from_file(str(path)).distributed_type == expected[path.stem]
