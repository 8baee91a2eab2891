"""The examples of translation, summarisation, language modelling and dialogue: one process and two, resuming, and metrics."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_clm as clm
import run_dialogue as dialogue
import run_mlm as mlm
import run_summarization as summarization
import run_translation as translation
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu, corpus_chrf
from sacrebleu.metrics import BLEU
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_synthesizer import InvalidConfigError
from shared import training
from tests.helpers.task_rows import sentences, tokenizer, write_json, write_model, write_parallel, write_text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUIET = ("--report_to=none", "--disable_tqdm=True", "--use_cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of all examples."""
    folder = tmp_path_factory.mktemp("tasks")
    for kind in ("t5", "marian", "mbart", "mbart50", "bart", "bert", "llama"):
        write_model(kind, folder / kind)
    write_parallel(folder / "mt")
    write_text(folder / "train.txt", 60, 0)
    write_text(folder / "valid.txt", 30, 1)
    for split, count in {"train": 16, "validation": 6, "test": 4}.items():
        texts, summaries = sentences(count, 2), sentences(count, 3)
        rows = [{"dialogue": text, "summary": short} for text, short in zip(texts, summaries, strict=True)]
        (folder / "summ").mkdir(exist_ok=True)
        write_json(folder / "summ" / f"{split}.jsonl", rows)
        talks = [{"dialogue": sentences(3, seed)} for seed in range(count // 2)]
        (folder / "talk").mkdir(exist_ok=True)
        write_json(folder / "talk" / f"{split}.json", talks)
    return folder


def translating(folder: Path, output: Path, *more: str, model: str = "t5") -> list[str]:
    flags = [f"--model_name_or_path={folder / model}", f"--output_dir={output}", f"--dataset_name={folder / 'mt'}"]
    flags += ["--source_lang=de", "--target_lang=en", "--max_source_length=16", "--max_target_length=12"]
    flags += ["--do_train", "--do_eval", "--num_train_epochs=1", "--learning_rate=1e-2", *QUIET, *more]
    return flags


def modelling(folder: Path, output: Path, *more: str, model: str = "llama") -> list[str]:
    flags = [
        f"--model_name_or_path={folder / model}",
        f"--output_dir={output}",
        f"--train_file={folder / 'train.txt'}",
    ]
    flags += [f"--validation_file={folder / 'valid.txt'}", "--do_train", "--do_eval", "--num_train_epochs=1"]
    return [*flags, "--learning_rate=1e-2", "--max_length=16", *QUIET, *more]


def saved(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())["synthesizer"]


def assert_same_weights(first: Path, second: Path) -> None:
    models = [load_file(path / "model.safetensors") for path in (first, second)]
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=1e-4, atol=1e-6, msg=name)


def whole_and_resumed(run: Callable[[str], Any], folder: Path, *begun: str) -> tuple[Any, Any]:
    """What an uninterrupted run says, and one that begins with what that one had left on its way: both end with the same weights."""
    whole = run("whole")
    (folder / "parts").mkdir()
    for name in begun:
        (folder / "whole" / name).rename(folder / "parts" / name)
    parts = run("parts")
    assert_same_weights(folder / "whole", folder / "parts")
    return whole, parts


# ---- translation ------------------------------------------------------------------------------------------------


def test_translation_with_a_prefix_scores_as_sacrebleu_does(folder: Path, tmp_path: Path) -> None:
    flags = ["--source_prefix=sieht : ", "--variant=random+dot_product", "--mixing=sum", "--do_predict"]
    metrics = translation.main(translating(folder, tmp_path, *flags, "--num_beams=2", "--val_max_target_length=12"))
    found = (tmp_path / "generated_predictions.txt").read_text().splitlines()
    wanted = (folder / "mt" / "tiny.test.en").read_text().splitlines()
    assert len(found) == 5
    assert metrics["predict_bleu"] == pytest.approx(corpus_bleu(found, [wanted]).score)
    assert metrics["predict_chrf"] == pytest.approx(corpus_chrf(found, [wanted]).score)
    assert {"eval_bleu", "eval_chrf", "eval_loss", "eval_gen_len"} <= set(metrics)
    layers = saved(tmp_path)["layers"]
    assert set(layers) == {"encoder", "decoder"}


@pytest.mark.parametrize("model", ["marian", "mbart", "mbart50"])
def test_translation_by_models_that_know_languages(model: str, folder: Path, tmp_path: Path) -> None:
    codes = [] if model == "marian" else ["--source_lang=de_DE", "--target_lang=en_XX"]
    flags = translating(folder, tmp_path, *codes, "--variant=dense", "--transfer_steps=3", model=model)
    translation.main(flags)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    speaker = AutoTokenizer.from_pretrained(tmp_path)
    english = speaker.convert_tokens_to_ids("en_XX")
    # A target of mBART-50 starts with its language; one of mBART is generated from it; Marian is told nothing.
    found = (settings.get("forced_bos_token_id"), settings["decoder_start_token_id"])
    assert found == {"marian": (None, 0), "mbart": (None, english), "mbart50": (english, 2)}[model]
    if model != "marian":
        assert (speaker.src_lang, speaker.tgt_lang) == ("de_DE", "en_XX")


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_translation_with_a_budget_and_a_teacher(by: str, folder: Path, tmp_path: Path) -> None:
    more = ["--variant=random", "--layers=suggest", "--budget=0.5", f"--by={by}", "--transfer_steps=3"]
    translation.main(translating(folder, tmp_path, *more, f"--teacher={folder / 't5'}"))
    chosen = saved(tmp_path)["layers"]
    assert sum(row is not None for rows in chosen.values() for row in rows) >= 2


def test_a_resumed_translation_ends_where_an_uninterrupted_one_does(folder: Path, tmp_path: Path) -> None:
    def run(name: str) -> dict[str, float]:
        more = ["--variant=dense", "--transfer_steps=3", "--save_strategy=steps", "--save_steps=2"]
        return translation.main(translating(folder, tmp_path / name, *more, "--num_train_epochs=2"))

    whole, parts = whole_and_resumed(run, tmp_path, "checkpoint-2", "transfer")
    assert parts["eval_bleu"] == pytest.approx(whole["eval_bleu"]) and parts["eval_loss"] == pytest.approx(
        whole["eval_loss"], abs=1e-5
    )


def test_translation_from_scratch_and_without_generation(folder: Path, tmp_path: Path) -> None:
    flags = [f"--tokenizer_name={folder / 't5'}", "--model_type=t5", "--no_predict_with_generate", "--do_predict"]
    flags += [
        "--config_overrides=d_model=16,num_layers=1,num_heads=2,d_ff=16,d_kv=8",
        "--variant=random",
        "--max_steps=1",
    ]
    metrics = translation.main(translating(folder, tmp_path, *flags)[1:])
    assert "predict_loss" in metrics and "eval_bleu" not in metrics
    assert not (tmp_path / "generated_predictions.txt").exists()


# ---- summarisation ----------------------------------------------------------------------------------------------


def summarising(folder: Path, output: Path, *more: str) -> list[str]:
    flags = [
        f"--model_name_or_path={folder / 'bart'}",
        f"--dataset_name={folder / 'summ'}",
        "--variant=random+salience",
    ]
    flags += [f"--output_dir={output}", "--max_source_length=24", "--max_target_length=10", "--transfer_steps=3"]
    return [*flags, "--do_train", "--do_eval", *more, *QUIET]


def test_summarisation_scores_as_rouge_score_does(folder: Path, tmp_path: Path) -> None:
    metrics = summarization.main(summarising(folder, tmp_path, "--do_predict", "--num_train_epochs=1"))
    found = (tmp_path / "generated_predictions.txt").read_text().splitlines()
    wanted = [json.loads(line)["summary"] for line in (folder / "summ" / "test.jsonl").read_text().splitlines()]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    for kind in scorer.rouge_types:
        scores = [scorer.score(text, guess)[kind].fmeasure for text, guess in zip(wanted, found, strict=True)]
        assert metrics[f"predict_{kind}"] == pytest.approx(100 * sum(scores) / len(scores))


def test_a_resumed_summarisation_ends_where_an_uninterrupted_one_does(folder: Path, tmp_path: Path) -> None:
    def run(name: str) -> dict[str, float]:
        more = ["--save_strategy=steps", "--save_steps=2", "--num_train_epochs=2"]
        return summarization.main(summarising(folder, tmp_path / name, *more))

    whole, parts = whole_and_resumed(run, tmp_path, "checkpoint-2", "transfer")
    assert parts["eval_rougeL"] == pytest.approx(whole["eval_rougeL"])


# ---- language models --------------------------------------------------------------------------------------------


def test_a_language_model_from_weights_has_the_perplexity_of_its_loss(folder: Path, tmp_path: Path) -> None:
    more = ["--variant=random+dot_product", "--layers=0", "--transfer_steps=3", "--per_device_eval_batch_size=3"]
    metrics = clm.main(modelling(folder, tmp_path, *more))
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]), rel=1e-4)
    assert metrics["eval_samples"] * 15 == metrics["eval_tokens"]  # blocks of 16, the first token of each unguessed
    assert saved(tmp_path)["layers"] == {"decoder": [0, None]} or None in next(
        iter(saved(tmp_path)["layers"].values())
    )


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_a_language_model_with_a_budget(by: str, folder: Path, tmp_path: Path) -> None:
    more = ["--variant=factorized_random", "--layers=suggest", "--budget=0.5", f"--by={by}", "--max_steps=1"]
    clm.main(modelling(folder, tmp_path, *more))
    assert (tmp_path / "config.json").exists() and saved(tmp_path)["layers"]


def test_a_language_model_from_scratch_reads_its_text_while_training(folder: Path, tmp_path: Path) -> None:
    flags = modelling(folder, tmp_path, "--streaming", "--max_steps=3", "--variant=dense", "--block_size=8")[1:]
    scratch = ["--model_type=gpt2", "--config_overrides=n_embd=16,n_layer=2,n_head=2,n_positions=16,vocab_size=32"]
    metrics = clm.main([*flags, *scratch, f"--tokenizer_name={folder / 'llama'}"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model.config).model_type == "synthesizer_gpt2" and model.config.n_layer == 2
    tokens = [token for line in (folder / "valid.txt").open() for token in tokenizer()(line)["input_ids"]]
    blocks = torch.tensor(tokens[: len(tokens) // 8 * 8]).view(-1, 8)
    with torch.no_grad():
        loss = model(blocks, labels=blocks).loss
    assert metrics["eval_perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize("streaming", [False, True], ids=["", "streaming"])
@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_resumed_language_model_ends_where_an_uninterrupted_one_does(
    task: str, streaming: bool, folder: Path, tmp_path: Path
) -> None:
    script, model = {"clm": (clm, "llama"), "mlm": (mlm, "bert")}[task]

    def run(name: str) -> dict[str, float]:
        more = ["--variant=dense", "--save_strategy=steps", "--save_steps=2", "--max_steps=5"]
        more += ["--streaming"] if streaming else []
        return script.main(modelling(folder, tmp_path / name, *more, "--per_device_train_batch_size=4", model=model))

    whole, parts = whole_and_resumed(run, tmp_path, "checkpoint-2")
    assert parts["eval_perplexity"] == pytest.approx(whole["eval_perplexity"], rel=1e-4)


@pytest.mark.parametrize("lines", [False, True], ids=["blocks", "lines"])
def test_a_masked_language_model(lines: bool, folder: Path, tmp_path: Path) -> None:
    more = ["--variant=dense+salience", "--transfer_steps=3", *(["--line_by_line"] if lines else [])]
    metrics = mlm.main(modelling(folder, tmp_path, *more, model="bert"))
    assert 1 < metrics["eval_perplexity"] < 100 and 0 <= metrics["eval_accuracy"] <= 1
    assert not lines or metrics["eval_samples"] == 30
    again = [flag for flag in modelling(folder, tmp_path / "again", *more[2:]) if flag != "--do_train"]
    again = mlm.main([*again, f"--model_name_or_path={tmp_path}"])
    assert again["eval_perplexity"] == pytest.approx(metrics["eval_perplexity"], rel=1e-5)  # the same masks


def test_a_training_that_has_ended_is_not_begun_again(folder: Path, tmp_path: Path) -> None:
    flags = modelling(folder, tmp_path, "--max_steps=3", "--lr_scheduler_type=constant", "--variant=dense")
    first, again = clm.main(flags), clm.main(flags)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}
    assert again["eval_perplexity"] == pytest.approx(first["eval_perplexity"], rel=1e-6)
    more = clm.main([*flags, "--max_steps=4"])
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    assert more["eval_perplexity"] != first["eval_perplexity"]
    for flag, message in (
        ("--variant=random", "dense there, random here"),
        (f"--model_name_or_path={write_model('gpt2', tmp_path / 'gpt2')}", "a llama there, a gpt2 here"),
    ):
        with pytest.raises(InvalidConfigError, match=f"another training .{message}.*name another --output_dir"):
            clm.main([*flags, flag])


def test_a_share_of_the_training_text_is_kept_where_there_is_no_other(folder: Path, tmp_path: Path) -> None:
    flags = [flag for flag in modelling(folder, tmp_path, "--max_steps=1") if not flag.startswith("--validation_file")]
    metrics = clm.main([*flags, "--validation_split_percentage=25", "--max_train_samples=5"])
    words = sum(len(line.split()) + 1 for line in (folder / "train.txt").read_text().splitlines()[:15])
    assert metrics["eval_samples"] == words // 16 and metrics["train_samples"] == 5


def test_weights_are_trained_in_full_precision_whatever_the_checkpoint_says(folder: Path, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(folder / "llama").save_pretrained(tmp_path / "half")
    for flags, dtype in (([], torch.float32), (["--torch_dtype=auto"], torch.bfloat16)):
        flags = [f"--model_name_or_path={tmp_path / 'half'}", "--variant=random", "--max_steps=1", *flags]
        clm.main(modelling(folder, tmp_path / str(dtype), *flags))
        assert {tensor.dtype for tensor in load_file(tmp_path / str(dtype) / "model.safetensors").values()} >= {dtype}
        assert AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype)).dtype == dtype


def test_what_cannot_be_pushed_is_known_before_the_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(training, "create_repo", unreachable)
    with pytest.raises(InvalidConfigError, match="--push_to_hub: the repository mine/.* .no route.* push later"):
        clm.main(modelling(folder, tmp_path / "out", "--push_to_hub", "--hub_model_id=mine/model"))
    assert not (tmp_path / "out" / "model.safetensors").exists()


# ---- dialogue ---------------------------------------------------------------------------------------------------


def test_dialogue_is_judged_by_what_is_replied(folder: Path, tmp_path: Path) -> None:
    flags = [
        f"--model_name_or_path={folder / 'llama'}",
        f"--dataset_name={folder / 'talk'}",
        "--variant=random+salience",
    ]
    flags += [
        f"--output_dir={tmp_path}",
        "--max_length=24",
        "--max_reply_length=8",
        "--transfer_steps=3",
        "--num_train_epochs=1",
    ]
    metrics = dialogue.main([*flags, "--do_train", "--do_eval", "--do_predict", *QUIET])
    found = (tmp_path / "replies_test.txt").read_text().split("\n")[:-1]
    talks = [json.loads(line)["dialogue"] for line in (folder / "talk" / "test.json").read_text().splitlines()]
    wanted = [turn for turns in talks for turn in turns[1:]]
    assert len(found) == len(wanted) == metrics["predict_samples"] == 4
    assert metrics["predict_bleu1"] == pytest.approx(BLEU(max_ngram_order=1).corpus_score(found, [wanted]).score)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [scorer.score(text, guess)["rougeL"].fmeasure for text, guess in zip(wanted, found, strict=True)]
    assert metrics["predict_rougeL"] == pytest.approx(100 * sum(scores) / len(scores))
    assert metrics["eval_tokens"] == sum(
        min(8, len(turn.split()) + 1) for turns in _talks(folder) for turn in turns[1:]
    )


def _talks(folder: Path) -> list[list[str]]:
    return [json.loads(line)["dialogue"] for line in (folder / "talk" / "validation.json").read_text().splitlines()]


def test_a_resumed_dialogue_ends_where_an_uninterrupted_one_does(folder: Path, tmp_path: Path) -> None:
    def run(name: str) -> dict[str, float]:
        flags = [f"--model_name_or_path={folder / 'llama'}", f"--dataset_name={folder / 'talk'}", "--variant=dense"]
        flags += [f"--output_dir={tmp_path / name}", "--max_length=24", "--max_reply_length=8", "--num_train_epochs=2"]
        return dialogue.main([*flags, "--do_train", "--do_eval", "--save_strategy=steps", "--save_steps=2", *QUIET])

    whole, parts = whole_and_resumed(run, tmp_path, "checkpoint-2")
    assert parts["eval_bleu1"] == pytest.approx(whole["eval_bleu1"])


# ---- two processes ----------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize("script", ["run_translation.py", "run_clm.py"])
def test_two_processes_count_every_row_once(script: str, folder: Path, tmp_path: Path) -> None:
    """7 pairs and an odd number of blocks do not split evenly: two processes score what the saved model scores in one."""
    flags = translating if script == "run_translation.py" else modelling
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(EXAMPLES / script),
    ]
    more = ["--variant=dense", "--transfer_steps=3", "--per_device_eval_batch_size=2", "--max_steps=2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *flags(folder, tmp_path / "two", *more)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    module = translation if script == "run_translation.py" else clm
    alone = flags(folder, tmp_path / "one", f"--model_name_or_path={tmp_path / 'two'}")
    one = module.main([flag for flag in alone if flag != "--do_train"])
    for name in (
        ("eval_bleu", "eval_chrf", "eval_gen_len") if module is translation else ("eval_perplexity", "eval_tokens")
    ):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
