"""The command line: each command does its one thing, and its JSON and its errors can be read. Two tests start real processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from hf_synthesizer import list_model_types, list_variants
from hf_synthesizer.cli.app import app, main
from tests.helpers.glue_rows import write_model, write_tasks
from tests.helpers.hub_server import HubServer, hub  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("the film is good .", "the plot was bad ?", "a very good actor and a scene")

# The commands hand folders to each other: one worker runs them, in this order.
pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock model, the tasks of GLUE, and texts."""
    home = tmp_path_factory.mktemp("cli")
    for name in ("stock", "glue"):
        (home / name).mkdir()
    write_model(home / "stock")
    write_tasks(home / "glue")
    (home / "texts.txt").write_text("\n".join(TEXTS * 12))
    return home


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "hf_synthesizer", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which imports Transformers once for all commands."""
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(StringIO()) as stdout,
        contextlib.redirect_stderr(StringIO()) as stderr,
        pytest.raises(SystemExit) as ended,
    ):
        main(list(arguments))
    return subprocess.CompletedProcess(arguments, ended.value.code or 0, stdout.getvalue(), stderr.getvalue())


def run(folder: Path, *arguments: str) -> Any:
    """The JSON that a command prints. Nothing else may be in stdout."""
    done = call(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(folder: Path, *arguments: str, code: int = 1) -> str:
    """The one message of a command that cannot be done."""
    done = call(folder, *arguments)
    assert done.returncode == code and not done.stdout, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


def commands(group: Any, path: str = "hf-synthesizer") -> dict[str, Any]:
    """Every command by its words, such as "hf-synthesizer plot page"."""
    every: dict[str, Any] = {}
    for name, command in group.commands.items():
        words = f"{path} {name}"
        every |= commands(command, words) if hasattr(command, "commands") else {words: command}
    return every


def test_the_help_of_every_command_has_an_example_of_it() -> None:
    every = commands(typer.main.get_command(app))
    assert len(every) == 18
    for called, command in every.items():
        assert "Example" in command.help and f"\n  {called}" in command.help, called


def test_help_imports_nothing_heavy(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hf_synthesizer", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "Examples:" in done.stdout and "doctor" in done.stdout
    assert "typer" in imported and not imported & {"torch", "transformers", "numpy", "rich", "huggingface_hub"}
    assert "hf-synthesizer patch bert-base-uncased --plan plan.json" in start(folder, "patch", "--help").stdout
    script = start(folder, _HF_SYNTHESIZER_COMPLETE="source_bash").stdout
    assert "hf-synthesizer" in script and "complete" in script


def test_a_process_prints_its_report_alone_and_its_mistake_as_one_line(folder: Path) -> None:
    """All other output, such as that of libraries, goes to stderr, and no progress bar is in a log file."""
    done = start(folder, "patch", "stock", "--variant=random", "--max-length=16", "--output=first", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["output"] == "first", done.stderr
    assert "%|" not in done.stderr and "Traceback" not in done.stderr
    wrong = start(folder, "patch", "stock", "--output=x")
    assert wrong.returncode == 2 and not wrong.stdout and "--variant, or with --plan" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_lists_of_variants_and_model_types(folder: Path) -> None:
    variants = run(folder, "variants")
    assert list(variants) == list_variants() and variants["factorized_random"]["options"] == ["rank", "share_heads"]
    assert sorted(run(folder, "model-types")) == list_model_types()


def test_suggest_patch_transfer_and_report(folder: Path) -> None:
    texts = ("--texts", "texts.txt")
    plan = run(
        folder,
        "suggest",
        "stock",
        "--variant=random",
        "--budget=1",
        "--steps=2",
        "--batches=1",
        "--max-length=16",
        *texts,
    )
    (layer,) = plan["hybrid"]
    assert plan["hybrid"][layer] == {"variant": "random", "max_length": 16} and len(plan["costs"]) == 2
    (folder / "plan.json").write_text(json.dumps(plan))

    patched = run(folder, "patch", "stock", "--plan=plan.json", "--output=converted")
    assert patched["tokenizer"] and [layer["variant"] for layer in patched["synthesized"]] == ["random"]
    assert json.loads((folder / "converted" / "config.json").read_text())["model_type"] == "synthesizer_bert"

    taught = run(
        folder, "transfer", "converted", "--teacher=stock", "--steps=6", "--batch-size=8", "--output=taught", *texts
    )
    assert taught["steps"] == 6 and taught["layers"][0]["after"] < taught["layers"][0]["before"]

    report = run(folder, "report", "taught", "--lengths=8,16")
    assert len(report["synthesized"]) == len(report["stock"]) == 1
    assert report["parameters"] == patched["parameters"] and report["stock_parameters"] == patched["stock_parameters"]
    assert [cost["length"] for cost in report["costs"]] == [8, 16]
    assert all(cost["flops"] < cost["stock_flops"] for cost in report["costs"])

    drawn = run(
        folder, "plot", "attention", "taught", "--teacher=stock", f"--text={TEXTS[0]}", "--output=attention.png"
    )
    assert drawn == {"output": "attention.png"} and (folder / "attention.png").stat().st_size > 5_000


def test_suggest_by_heads_is_a_plan_and_a_picture(folder: Path) -> None:
    task = ("--auto-class=AutoModelForSequenceClassification", "--max-length=16", "--texts=texts.txt", "--batches=1")
    plan = run(folder, "suggest", "stock", "--by=heads", "--variant=random+salience", "--budget=1,0.5", *task)
    every = sum(len(row) for _, row in plan["heads"])
    assert [count for count, _ in plan["curve"]] == [1, -(-every // 2)] and plan["budget"] == 0.5
    assert sum(len(config["heads"]) for config in plan["hybrid"].values()) == -(-every // 2)
    assert all(config["max_length"] == 16 for config in plan["hybrid"].values())
    (folder / "heads.json").write_text(json.dumps(plan))
    run(folder, "patch", "stock", "--plan=heads.json", "--output=by_heads")
    patched = run(folder, "report", "by_heads", "--lengths=8")
    assert len(patched["synthesized"]) == len(plan["hybrid"])
    assert run(folder, "plot", "suggestion", "heads.json", "--output=heads.png") == {"output": "heads.png"}
    message = refused(folder, "suggest", "stock", "--variant=random", "--budget=1,0.5", "--texts=texts.txt", code=2)
    assert "several budgets need --by heads" in " ".join(message.replace("│", " ").split())


def test_suggest_takes_a_menu(folder: Path) -> None:
    task = ("--auto-class=AutoModelForSequenceClassification", "--max-length=16", "--texts=texts.txt", "--batches=1")
    menu = ("--variant=relative:max_distance=4", "--variant=dot_product:window=3,sinks=1", "--variant=random")
    plan = run(folder, "suggest", "stock", "--by=heads", *menu, "--budget=2,multiply_adds=0.7@16", *task)
    assert [kind for kind, _ in plan["menu"]] == [
        {"variant": "relative", "max_length": None, "max_distance": 4},
        {"variant": "dot_product", "max_length": None, "window": 3, "sinks": 1},
        {"variant": "random", "max_length": 16},
    ]
    assert plan["budget"] == {"multiply_adds": 0.7, "length": 16}
    assert [size for size, _ in plan["curve"]] == [2, plan["budget"]]
    (folder / "menu.json").write_text(json.dumps(plan))
    run(folder, "patch", "stock", "--plan=menu.json", "--output=by_menu")
    assert len(run(folder, "report", "by_menu", "--lengths=8")["synthesized"]) == len(plan["hybrid"])
    assert run(folder, "plot", "suggestion", "menu.json", "--output=menu.png") == {"output": "menu.png"}
    for wrong, message in (
        (("--by=layers", *menu), "a menu needs --by heads"),
        (("--by=heads", "--variant=random", "--budget=cache=x@3"), "cache=0.3@8192"),
        (("--by=heads", "--variant=dot_product:window"), "write it as NAME=VALUE"),
    ):
        refusal = refused(folder, "suggest", "stock", *wrong, "--texts=texts.txt", code=2)
        assert message in " ".join(refusal.replace("│", " ").split())


def test_finetune_and_evaluate(folder: Path) -> None:
    data = ("--task=sst2", "--glue-dir=glue", "--max-length=16")
    tuned = run(folder, "finetune", "stock", "--variant=dense+salience", "--epochs=1", "--output=tuned", *data)
    assert tuned["train_samples"] == 24 and 0 <= tuned["eval_score"] <= 1
    evaluated = run(folder, "evaluate", "tuned", *data)
    assert evaluated["eval_samples"] == 11 and evaluated["eval_accuracy"] == pytest.approx(tuned["eval_accuracy"])


def test_a_finetuning_that_has_ended_is_not_begun_again(folder: Path) -> None:
    data = ("--task=mrpc", "--glue-dir=glue", "--max-length=16", "--epochs=1", "--output=suggested")
    swap = ("--variant=random", "--layers=suggest", "--transfer-steps=3", "--teacher=stock")
    tuned = run(folder, "finetune", "stock", *swap, *data)
    config = json.loads((folder / "suggested" / "config.json").read_text())
    assert sorted(config["synthesizer"]["layers"]["encoder"], key=str) == [0, None]
    again = run(folder, "finetune", "stock", *swap, *data)
    assert "train_loss" in tuned and "train_loss" not in again and again["eval_f1"] == tuned["eval_f1"]
    message = refused(folder, "finetune", "stock", *data, "--variant=dense")
    assert "is of another training (random there, dense here)" in message
    message = refused(folder, "finetune", "stock", *data, "--transfer-steps=3")
    assert "--transfer-steps is an option of the conversion, so it needs --variant" in message


def test_bench_and_doctor(folder: Path) -> None:
    bench = run(folder, "bench", "stock", "--variant=random", "--lengths=8", "--seconds=0.1")
    stock, random = bench["times"]
    assert stock["speedup"] == 1 and random["milliseconds"] > 0
    assert "Unknown variant 'nystrom'" in refused(folder, "bench", "stock", "--variant=nystrom+random")
    assert "at most 16,384 tokens" in refused(folder, "bench", "stock", "--lengths=100000")
    assert "'int8' is not one of 'float32'" in refused(folder, "bench", "stock", "--dtype=int8", code=2)
    doctor = run(folder, "doctor")
    routes = {check["route"]: check for check in doctor["routes"] if check["device"] == "cpu"}
    assert doctor["passed"] and all(routes[name]["forms"] for name in ("static", "chunked", "sdpa", "sparse"))
    assert {"torch", "transformers", "python"} <= set(doctor["versions"])


def test_push(folder: Path, tmp_path: Path, hub: HubServer) -> None:  # noqa: F811
    environment = {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    run(folder, "patch", "stock", "--variant=random", "--max-length=16", "--output=pushed")
    done = start(folder, "push", "pushed", "me/pushed", "--json", **environment)
    assert done.returncode == 0, done.stderr
    pushed = json.loads(done.stdout)
    assert pushed["repository"] == "me/pushed" and pushed["tokenizer"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(hub.repos["me/pushed"].files())
    message = refused(folder, "push", "pushed", "me/other")
    assert "error: me/other cannot be written on the Hub" in message and "hf auth login" in message
    assert "'bad name!' is no name of a repository" in refused(folder, "push", "pushed", "bad name!")


def test_mistakes_are_one_message(folder: Path) -> None:
    assert "Missing argument 'MODEL'" in refused(folder, "patch", code=2)
    assert "either with --variant, or with --plan" in refused(folder, "patch", "stock", "--output=x", code=2)
    message = refused(folder, "patch", "stock", "--variant=denze", "--output=x")
    assert message.startswith("error: Unknown variant 'denze'") and "Did you mean 'dense'?" in message
    message = refused(folder, "report", "nowhere")
    assert message.startswith("error: 'nowhere' cannot be loaded") and message.count("\n") == 1
    assert "there is no such folder" in refused(folder, "report", "./nowhere")
    assert not (folder / "x").exists()


def test_what_cannot_be_written_is_known_before_the_work(folder: Path) -> None:
    (folder / "file").write_text("")
    message = refused(folder, "patch", "stock", "--variant=dense", "--output=file/below")
    assert message.startswith("error: file/below cannot be written: Not a directory")
    attention = ("plot", "attention", "stock", "--text=the film is good .")
    assert "a.html must end in .png or .svg" in refused(folder, *attention, "--output=a.html")
    assert "there is no folder nowhere" in refused(folder, *attention, "--output=nowhere/a.png")
    assert "a.png must end in .html" in refused(folder, "plot", "page", *attention[2:], "--output=a.png")
    assert "cannot be read: No such file" in refused(folder, "patch", "stock", "--plan=none.json", "--output=x")


def test_models_of_the_wrong_kind_are_named(folder: Path) -> None:
    run(folder, "patch", "stock", "--variant=random", "--max-length=16", "--output=converted")
    for name, message in (
        (("patch", "converted", "--variant=dense"), "converted is converted already: start from the stock model"),
        (("transfer", "stock", "--texts=texts.txt"), "stock is stock: convert it first, hf-synthesizer patch stock"),
        (("transfer", "converted", "--teacher=converted", "--texts=texts.txt"), "converted is converted itself"),
    ):
        assert message in refused(folder, *name, "--output=x")
    plan = {"hybrid": {"0": "random"}, "costs": {f"encoder.{layer}": 0.1 for layer in range(7)}}
    (folder / "other.json").write_text(json.dumps(plan))
    message = refused(folder, "patch", "stock", "--plan=other.json", "--output=x")
    assert "made for another model: it has costs for 7 layers" in message
    data = ("--task=sst2", "--glue-dir=glue")
    message = refused(folder, "evaluate", "stock", *data)
    assert (
        "the scores judge the head that was loaded, but the checkpoint of this" in message and "classifier" in message
    )
    message = refused(folder, "evaluate", "stock")
    assert "--task" in message and "--validation-file" in message and "_file" not in message
