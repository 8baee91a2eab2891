"""What the examples of all tasks read, and what they say of data that cannot be trained on."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pandas
import pytest
import torch
from torch.nn import functional

from hf_synthesizer import InvalidConfigError
from hf_synthesizer.errors import DataError
from shared import files
from shared.command_line import parse
from shared.files import FileArguments, first, load_splits
from shared.masking import masker
from shared.perplexity import perplexity_of, sums
from tests.helpers.task_rows import pairs, sentences, tokenizer, write_json, write_model, write_parallel, write_text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LANGUAGES = ("de", "en")


def example(name: str):
    return importlib.import_module(f"run_{name}")


@pytest.mark.parametrize("kind", ["json", "nested", "csv", "parquet", "parallel", "folder"])
def test_the_same_pairs_from_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    rows, path = pairs(3, 0), tmp_path / f"train.{kind}"
    if kind == "json":
        write_json(path, rows)
    elif kind == "nested":
        write_json(path.with_suffix(".jsonl"), [{"translation": row} for row in rows])
    elif kind == "csv":
        pandas.DataFrame(rows).to_csv(path, index=False)
    elif kind == "parquet":
        pandas.DataFrame(rows).to_parquet(path)
    else:
        write_parallel(tmp_path, {"train": 3})
    name = {"parallel": tmp_path / "tiny.train", "nested": path.with_suffix(".jsonl")}.get(kind, path)
    arguments = FileArguments(train_file=str(name)) if kind != "folder" else FileArguments(dataset_name=str(tmp_path))
    splits = load_splits(arguments, languages=LANGUAGES)
    found = example("translation").pairs_of("train", splits["train"], LANGUAGES)
    assert [{"de": row["source"], "en": row["target"]} for row in found] == rows


def test_a_limit_and_streaming(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", 9, 0)
    for streaming in (False, True):
        arguments = FileArguments(train_file=str(path), max_train_samples=4)
        rows = list(first(load_splits(arguments, streaming=streaming)["train"], arguments.limit("train")))
        assert [row["text"].strip() for row in rows] == sentences(9, 0)[:4]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(files, "load_dataset", unreachable)
    with pytest.raises(DataError, match="nobody/nothing cannot be had from the Hub .ConnectionError.* --train_file"):
        load_splits(FileArguments(dataset_name="nobody/nothing"))
    with pytest.raises(DataError, match="Name the data once"):
        load_splits(FileArguments(dataset_name="nobody/nothing", train_file="train.txt"))


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("translation", ["--train_file={}/none.json"], "none.json does not exist"),
        ("translation", ["--train_file={}/train.doc"], "ends in '.doc': csv, json"),
        (
            "translation",
            ["--train_file={}/uneven", "--target_lang=fr"],
            "uneven.fr does not exist, the translation of",
        ),
        ("translation", ["--train_file={}/uneven.de"], "one side of parallel text: name both by .*uneven."),
        ("translation", ["--train_file={}/hole.json", "--max_train_samples=0"], "0 rows are none"),
        ("summarization", ["--train_file={}/head.csv"], "head.csv has no rows"),
        ("translation", ["--train_file={}/empty.json"], "empty.json is empty"),
        ("translation", ["--train_file={}/uneven"], "has 3 lines in de and 2 in en"),
        ("translation", ["--train_file={}/hole.json"], "Row 1 of the train data has no target text: found ''"),
        ("translation", ["--train_file={}/talk.json"], "neither a column translation nor de and en"),
        ("translation", ["--dataset_name={}/two"], "several files for train"),
        ("translation", [], "Name the data"),
        ("summarization", ["--train_file={}/hole.json"], "no column text or article .* name --text_column"),
        ("summarization", ["--train_file={}/hole.json", "--do_eval"], "no column text"),
        ("clm", ["--train_file={}/short.txt"], "less than one block of 512 tokens"),
        ("clm", ["--train_file={}/blank.json"], "less than one block of 512 tokens"),
        ("mlm", ["--train_file={}/blank.json", "--line_by_line"], "less than one block of 512 tokens"),
        ("clm", ["--train_file={}/hole.json", "--text_column=body"], "no column 'body': the columns are de, en"),
        (
            "clm",
            ["--validation_file={}/short.txt"],
            "--do_train needs train data, and there is only validation: name --train_file",
        ),
        ("dialogue", ["--train_file={}/hole.json"], "no column history and reply, or dialogue"),
        ("dialogue", ["--train_file={}/talk.json"], "Row 1 of the train data has no text in one of its turns"),
        ("dialogue", ["--train_file={}/lone.json"], "has a second turn"),
    ],
)
def test_bad_data_is_one_sentence_before_training(name: str, flags: list[str], message: str, tmp_path: Path) -> None:
    write_json(tmp_path / "hole.json", [{"de": "ein", "en": "a"}, {"de": "hund", "en": ""}])
    write_json(tmp_path / "talk.json", [{"dialogue": ["a", "b"]}, {"dialogue": ["a", ""]}])
    write_json(tmp_path / "blank.json", [{"text": ""}, {"text": ""}])
    write_json(tmp_path / "lone.json", [{"dialogue": ["a"]}])
    (tmp_path / "two").mkdir()
    for file in ("train.doc", "empty.json", "two/train-1.txt", "two/train-2.txt"):
        (tmp_path / file).write_text("" if "empty" in file else "a\n")
    (tmp_path / "head.csv").write_text("text,summary\n")
    (tmp_path / "uneven.de").write_text("ein\nder\nmann\n")
    (tmp_path / "uneven.en").write_text("a\nthe\n")
    write_text(tmp_path / "short.txt", 2, 0)
    kind = {"clm": "llama", "dialogue": "llama", "mlm": "bert"}.get(name, "t5")
    model = write_model(kind, tmp_path / "model")
    languages = ["--source_lang=de", "--target_lang=en"] if name == "translation" else []
    given = [flag.format(tmp_path) for flag in flags]
    with pytest.raises(DataError, match=message) as caught:
        example(name).main(
            [f"--model_name_or_path={model}", f"--output_dir={tmp_path / 'out'}", "--do_train", *languages, *given]
        )
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("clm", ["--model_type=gpt3", "--tokenizer_name={}/model"], "that Transformers knows .got gpt3."),
        ("clm", ["--model_type=gpt2"], "name --tokenizer_name"),
        ("clm", ["--model_type=gpt2", "--variant=dense", "--transfer_steps=9"], "has nothing to teach"),
        ("clm", ["--model_name_or_path={}/model", "--config_overrides=n_layer=1"], "for a model from scratch"),
        (
            "clm",
            ["--model_type=gpt2", "--tokenizer_name={}/model", "--config_overrides=depth=1"],
            "key depth isn't in the original",
        ),
        ("clm", ["--model_name_or_path={}/model", "--streaming"], "--streaming .* say --max_steps"),
        ("clm", ["--model_name_or_path={}/nowhere"], "nowhere, which is no folder here, cannot be loaded"),
        (
            "clm",
            ["--model_name_or_path={}/model", "--teacher={}/nowhere", "--max_length=16", "--variant=random"],
            "The teacher .*nowhere",
        ),
        ("clm", ["--model_name_or_path={}/bert"], "sees the tokens that it is to predict: .* run_mlm.py"),
        ("clm", ["--model_name_or_path={}/t5"], "is a t5, which has no such head: run_translation.py and run_summ"),
        (
            "mlm",
            ["--model_name_or_path={}/model"],
            "is a llama, which has no such head: run_clm.py and run_dialogue.py",
        ),
        (
            "clm",
            ["--model_name_or_path={}/model", "--teacher={}/t5", "--max_length=16", "--variant=random"],
            "t5 is a t5, which has no",
        ),
        (
            "clm",
            ["--model_name_or_path={}/model", "--variant=random", "--budget=0.3", "--max_length=16"],
            "--budget .* --layers suggest",
        ),
        ("clm", ["--model_name_or_path={}/model", "--zzz=3"], "There is no --zzz: --help lists all"),
        (
            "clm",
            ["--model_name_or_path={}/model", "--lerning_rate=3"],
            "There is no --lerning_rate; did you mean --learning_rate",
        ),
        (
            "clm",
            ["--model_name_or_path={}/model", "--max_steps=abc"],
            "Argument --max_steps.* invalid int value: 'abc'",
        ),
        (
            "clm",
            ["--model_name_or_path={}/model", "--resume_from_checkpoint={}/out", "--max_length=16"],
            "is no folder with a trainer_state",
        ),
        (
            "clm",
            ["--model_type=gpt2", "--tokenizer_name={}/model", "--config_overrides=n_embd=30,n_head=4"],
            "must be divisible",
        ),
        (
            "mlm",
            [
                "--model_type=roberta",
                "--tokenizer_name={}/model",
                "--config_overrides=max_position_embeddings=64,num_hidden_layers=1,hidden_size=12,vocab_size=30",
                "--max_length=64",
            ],
            "64 is more than the 63 positions",
        ),
        ("clm", ["--model_name_or_path={}/model", "--max_length=65"], "65 is more than the 64 positions"),
        ("dialogue", ["--model_name_or_path={}/model", "--max_length=8", "--max_reply_length=8"], "leave room"),
        ("translation", ["--model_name_or_path={}/mbart", "--source_lang=xx"], "no token for the language 'xx'"),
        ("translation", ["--model_name_or_path={}/mbart", "--max_length=8"], "8 is less than the longest text"),
    ],
)
def test_flags_that_do_not_fit_say_so(name: str, flags: list[str], message: str, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "model")
    for kind in {"translation": ("mbart",), "clm": ("bert", "t5")}.get(name, ()):
        write_model(kind, tmp_path / kind)
    path = write_text(tmp_path / "train.txt", 400, 0)
    if name == "dialogue":
        path = write_json(tmp_path / "train.json", [{"history": "a\nb", "reply": "c"}])
    if name == "translation":
        path = write_json(tmp_path / "train.json", [{"en": "a", "de": "ein", "xx": "a"}])
    given = [flag.format(tmp_path) for flag in flags]
    if name == "translation":
        given = ["--target_lang=en", "--source_lang=de", "--max_source_length=16", "--max_target_length=16", *given]
    with pytest.raises(InvalidConfigError, match=message):
        example(name).main([f"--train_file={path}", f"--output_dir={tmp_path / 'out'}", "--do_train", *given])


@pytest.mark.parametrize("name", ["translation", "summarization", "clm", "mlm", "dialogue"])
def test_the_command_line_reports_bad_data_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "none.csv"
    given = [f"--train_file={path}", f"--output_dir={tmp_path}", "--do_train"]
    given += ["--source_lang=de", "--target_lang=en"] if name == "translation" else []
    monkeypatch.setattr(sys, "argv", [f"run_{name}.py", *given])
    with pytest.raises(SystemExit, match=f"^error: {path} does not exist.$"):
        runpy.run_path(str(EXAMPLES / f"run_{name}.py"), run_name="__main__")


def test_masks_hide_words_as_bert_was_taught_and_never_special_tokens() -> None:
    words = tokenizer()
    batch = {"input_ids": torch.randint(5, len(words), (200, 60))}
    batch["input_ids"][:, ::6] = 1
    masked = masker(words, 0.15)
    found = masked(batch, torch.Generator().manual_seed(0))
    guessed = found["labels"] != -100
    ids, seen = batch["input_ids"], found["input_ids"]
    assert not guessed[:, ::6].any() and torch.equal(found["labels"][guessed], ids[guessed])
    assert torch.equal(seen[~guessed], ids[~guessed])
    share = guessed.float().mean().item() * 6 / 5
    hidden = (seen == words.mask_token_id)[guessed].float().mean().item()
    replaced = ((seen != ids) & (seen != words.mask_token_id))[guessed].float().mean().item()
    assert (share, hidden, replaced) == pytest.approx((0.15, 0.8, 0.1), abs=0.03)
    again = masked(batch, torch.Generator().manual_seed(0))
    assert torch.equal(again["input_ids"], seen)


def test_perplexity_counts_tokens_whatever_the_batches() -> None:
    logits, labels = torch.randn(5, 7, 11), torch.randint(11, (5, 7))
    labels[1, 3:] = -100
    for causal in (False, True):
        seen, wanted = (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)
        loss = functional.cross_entropy(seen.reshape(-1, 11), wanted.reshape(-1), ignore_index=-100)
        parts = [sums(logits[rows], labels[rows], causal=causal) for rows in ([0, 1], [2, 3, 4])]
        found = perplexity_of(torch.cat(parts).numpy())
        assert found["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)
        right = (seen.argmax(-1) == wanted)[wanted != -100].float().mean().item()
        assert found["accuracy"] == pytest.approx(right) and found["tokens"] == (wanted != -100).sum()


@pytest.mark.parametrize("document", ["docs/tasks.md", "examples/README.md"])
def test_every_documented_command_is_understood(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line, as it is copied: its script knows all its flags."""
    text = (EXAMPLES.parent / document).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^python examples/run_(\w+)\.py (.*)$", text, re.MULTILINE)
    assert {name for name, _ in commands} >= {"translation", "summarization", "clm", "mlm", "dialogue"}

    class Understood(Exception):
        pass

    def parsed(classes: tuple, argv: list[str]) -> tuple:
        parse(classes, argv)
        raise Understood

    for name, flags in commands:
        monkeypatch.setattr(example(name), "parse", parsed)
        with pytest.raises(Understood):
            example(name).main(shlex.split(flags))
