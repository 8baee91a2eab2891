"""Both GLUE scripts: one process and two, resuming, and what they say of bad data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_glue
import run_glue_no_trainer
import torch
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForSequenceClassification, BertTokenizerFast

from hf_synthesizer import InvalidConfigError
from hf_synthesizer.glue.tasks import get_task
from shared.command_line import parse
from shared.glue import DataArguments, collator, load_data, tokenize
from tests.helpers.glue_rows import EXAMPLES, GOOD, write_rows


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


@pytest.mark.parametrize("flag", ["--task", "--task_name", "--task-name"])
def test_a_task_is_named_by_either_flag(flag: str) -> None:
    [data] = parse((DataArguments,), [f"{flag}=mrpc"])
    assert data.task_name == "mrpc"
    with pytest.raises(InvalidConfigError, match="There is no --task_n; did you mean --task"):
        parse((DataArguments,), ["--task_n=mrpc"])


def test_the_loop_refuses_a_flag_that_is_cut_short(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="There is no --task_n; did you mean --task"):
        run_glue_no_trainer.main(flags(model_dir, tmp_path, "--task_n=mrpc"))


@pytest.mark.parametrize("name", ["stsb", "copa"])
def test_only_a_trained_head_teaches_its_answers(name: str, model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    task = [f"--task_name={name}", f"--glue_dir={glue_dir}"]
    answers = ["--variant=random", "--transfer_steps=3", "--transfer_answers=2"]
    stock = tmp_path / "stock"
    run_glue.main(trainer_flags(model_dir, stock, *task))
    for model, more in ((model_dir, []), (stock, [f"--teacher={model_dir}"])):
        with pytest.raises(InvalidConfigError, match="--transfer_answers learns .* fine-tuned on the task"):
            run_glue.main(trainer_flags(model, tmp_path / "converted", *task, *answers, *more))
        assert not (tmp_path / "converted" / "transfer").exists()
    for folder, more in (("one", []), ("two", [f"--teacher={stock}"])):
        run_glue.main(trainer_flags(stock, tmp_path / folder, *task, *answers, *more))
        assert (tmp_path / folder / "config.json").exists()
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_trainer_example_with_a_suggested_hybrid_and_a_teacher(
    model_dir: Path, glue_dir: Path, tmp_path: Path, by: str
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
            f"--by={by}",
            "--transfer_steps=3",
            f"--teacher={model_dir}",
        )
    )
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["synthesizer"]["layers"]["encoder"]
    if by == "layers":
        assert sorted(layers, key=str) == [0, None]
    else:
        heads = sum(
            len(row.get("heads", range(config["num_attention_heads"]))) for row in config["synthesizer"]["configs"]
        )
        assert heads == len(layers) * config["num_attention_heads"] / 2


def test_heads_are_chosen_by_measuring(model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    task = ["--task_name=mrpc", f"--glue_dir={glue_dir}", "--variant=random"]
    for more, message in ((["--by=heads"], "needs --layers suggest"), (["--by=eye"], "layers or heads")):
        with pytest.raises(InvalidConfigError, match=message):
            run_glue.main(trainer_flags(model_dir, tmp_path, *task, *more))


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
    models = [load_file(path / "model.safetensors") for path in (first, second)]
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
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)).__name__.startswith("SynthesizerBert")


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


# ---- both, in two processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["run_glue.py", "run_glue_no_trainer.py"])
def test_two_processes_count_every_row_once(script: str, model_dir: Path, glue_dir: Path, tmp_path: Path) -> None:
    """11 validation rows do not split evenly: the metric of two processes must be that of the saved model on all 11."""
    more = ["--task_name=mrpc", f"--glue_dir={glue_dir}", "--variant=dense", "--transfer_steps=3"]
    more += ["--per_device_eval_batch_size=4"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [
        str(EXAMPLES / script),
        *(trainer_flags if script == "run_glue.py" else flags)(model_dir, tmp_path, *more),
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    if script == "run_glue.py":
        state = json.loads((tmp_path / "trainer_state.json").read_text())
        assert state["global_step"] == 2  # 24 rows, 8 for each process
    else:
        assert "2 steps of 8 rows in each of 2 processes" in done.stdout

    metrics = json.loads((tmp_path / "all_results.json").read_text())
    arguments = DataArguments(task_name="mrpc", glue_dir=str(glue_dir), max_length=16)
    task, rows = load_data(arguments)
    tokenizer = BertTokenizerFast.from_pretrained(model_dir)
    encoded = tokenize(task, rows["validation"], tokenizer, arguments)
    batch = collator(task, tokenizer, arguments)([encoded[number] for number in range(len(encoded))])
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
