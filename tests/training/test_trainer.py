"""Trainer and Seq2SeqTrainer on patched models: checkpoints, resuming, the best model, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from hf_synthesizer import CheckpointMismatchError, NotPatchedError, patch_model
from hf_synthesizer.checkpoints.trainer_model_card import attach_model_card
from tests.helpers.models import build
from tests.helpers.word_tokenizer import tokenizer


class Sentences(Dataset):
    """Rows of different lengths; the label is whether the second token is even."""

    def __init__(self, rows: int = 16, seq2seq: bool = False):
        generator = torch.Generator().manual_seed(7)
        self.rows: list[dict[str, Any]] = []
        for row in range(rows):
            ids = [2, *torch.randint(4, 64, (4 + row % 5,), generator=generator).tolist(), 3]
            labels = ids[1:4] if seq2seq else ids[1] % 2
            self.rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def classifier(variant: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return patch_model(build("BertForSequenceClassification"), variant)


def make_trainer(model: PreTrainedModel, folder: Path, **settings: Any) -> Trainer:
    arguments: dict[str, Any] = dict(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    return Trainer(
        model,
        TrainingArguments(**{**arguments, **settings}),
        train_dataset=Sentences(),
        eval_dataset=Sentences(6),
        data_collator=DataCollatorWithPadding(tokenizer()),
    )


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize(
    "variant", ["random", "factorized_dense", "fixed_random+dot_product", "dense+salience", "alsh_sign"]
)
def test_resuming_reaches_the_same_bits(tmp_path: Path, variant: str) -> None:
    whole = classifier(variant)
    start = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    make_trainer(whole, tmp_path / "whole").train()
    assert any(
        not torch.equal(tensor, start[name]) for name, tensor in whole.state_dict().items() if ".synthesizer." in name
    )
    interrupted = tmp_path / "interrupted"  # such a run leaves its first checkpoint behind
    interrupted.mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(interrupted / "checkpoint-3")
    resumed = classifier(variant)
    make_trainer(resumed, interrupted).train(resume_from_checkpoint=True)
    assert same(whole, resumed)
    loaded = AutoModelForSequenceClassification.from_pretrained(interrupted / "checkpoint-6")
    assert type(loaded) is type(whole) and same(whole, loaded)


def test_every_checkpoint_is_complete(tmp_path: Path) -> None:
    trainer = make_trainer(classifier({0: "dense", 1: "random"}), tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for name in ("checkpoint-3", "checkpoint-6", "final"):
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert {"config.json", "model.safetensors", "modeling_hf_synthesizer.py", "README.md"} <= files
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
    assert same(trainer.model, AutoModelForSequenceClassification.from_pretrained(tmp_path / "final"))


def test_a_checkpoint_of_another_model_is_not_resumed(tmp_path: Path) -> None:
    make_trainer(classifier("dense"), tmp_path, max_steps=3).train()
    with pytest.raises(
        CheckpointMismatchError, match="patched in another way: their variant is .dense., here it is .random."
    ):
        make_trainer(classifier("random"), tmp_path).train(resume_from_checkpoint=True)
    path = tmp_path / "checkpoint-3" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if "synthesizer.columns" not in name}, path)
    with pytest.raises(CheckpointMismatchError, match=r"not its tensor 'bert.*synthesizer\.columns'"):
        make_trainer(classifier("dense"), tmp_path).train(resume_from_checkpoint=True)
    stock = build("BertForSequenceClassification")
    save_file(tensors, path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        make_trainer(stock, tmp_path).train(resume_from_checkpoint=True)


def test_resuming_prints_no_warning_of_strange_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(classifier("dense"), tmp_path, max_steps=3).train()
    transformers.logging.enable_propagation()
    make_trainer(classifier("dense"), tmp_path).train(resume_from_checkpoint=True)
    transformers.logging.disable_propagation()
    assert not [record for record in caplog.records if "keys" in record.getMessage()]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = make_trainer(
        classifier("random+salience"),
        tmp_path,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        learning_rate=0.5,  # so that the last is not the best
        load_best_model_at_end=True,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint != str(tmp_path / "checkpoint-6")
    assert same(trainer.model, AutoModelForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "bf16": {"bf16": True},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("variant", ["random", "factorized_dense", "fixed_random+dot_product", "dense+salience"])
def test_options(tmp_path: Path, variant: str, settings: dict[str, Any]) -> None:
    model = classifier(variant)
    start = {name: tensor.clone() for name, tensor in model.named_parameters()}
    result = make_trainer(model, tmp_path, max_steps=2, save_strategy="no", **settings).train()
    assert 0 < result.training_loss < 10
    moved = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, start[name])}
    assert {name for name in start if ".synthesizer." in name and not name.endswith("key.bias")} <= moved


@pytest.mark.parametrize("variant", ["dense", "random+dot_product", "factorized_random"])
def test_gradient_checkpointing_changes_no_gradient(variant: str) -> None:
    inputs = {"input_ids": torch.arange(4, 16).reshape(2, 6), "labels": torch.tensor([0, 1])}
    gradients = []
    for checkpointing in (False, True):
        model = classifier(variant).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model(**inputs).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize(
    "variant", ["dense", "random+dot_product", {"encoder": "dense", "decoder": "random"}], ids=str
)
def test_seq2seq_with_generation(tmp_path: Path, variant: Any) -> None:
    torch.manual_seed(0)
    model = patch_model(build("T5ForConditionalGeneration"), variant)
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            save_steps=2,
            per_device_train_batch_size=4,
            predict_with_generate=True,
            generation_max_length=6,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Sentences(seq2seq=True),
        eval_dataset=Sentences(6, seq2seq=True),
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model),
        processing_class=tokenizer(),
        compute_metrics=lambda prediction: {"too_long": bool(prediction.predictions[:, 6:].any())},  # 0 is padding
    )
    trainer.train()
    assert trainer.evaluate()["eval_too_long"] is False
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-2")
    assert same(model, loaded)
    ids = torch.tensor([[2, 9, 8, 3]])
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=5, num_beams=2), model.eval().generate(ids, max_new_tokens=5, num_beams=2)
    )


def test_a_card_with_results_for_a_local_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(classifier("dense"), tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nWords.\n")
    attach_model_card(trainer)
    trainer.train()
    trainer.create_model_card(dataset="GLUE", language="en")
    text = (tmp_path / "README.md").read_text()
    assert "license: mit" in text and "language:\n- en" in text and "# Mine\n\nWords.\n" in text
    assert "### Training results" in text and "Validation Loss" in text
    again = text
    trainer.create_model_card(dataset="GLUE", language="en")
    assert (tmp_path / "README.md").read_text() == again


def test_a_card_needs_a_patched_model(tmp_path: Path) -> None:
    with pytest.raises(NotPatchedError, match="has none.*Call patch_model"):
        attach_model_card(make_trainer(build("BertForSequenceClassification"), tmp_path))


def test_a_trainers_tokenizer_truncates_where_the_model_ends(tmp_path: Path) -> None:
    model = patch_model(build("BertForSequenceClassification"), "dense", max_length=12)
    trainer = make_trainer(model, tmp_path, max_steps=1)
    attach_model_card(trainer)
    trainer.save_model(str(tmp_path / "out"))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 12
