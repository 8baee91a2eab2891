"""transfer_attention and suggest_layers: distillation, resuming, suggestions, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from hf_synthesizer import (
    AlreadyPatchedError,
    InvalidConfigError,
    NotPatchedError,
    UnsupportedModelError,
    patch_model,
    suggest_layers,
    transfer_attention,
)
from hf_synthesizer.errors import CheckpointMismatchError
from hf_synthesizer.transfer.distill import answer_loss
from tests.helpers.models import VARIANTS, batch, build
from tests.helpers.teaching import HEADS, loader, self_attentions, sharp, student_of

# ---- distill ----------------------------------------------------------------------------------------------------


@pytest.mark.feature("transfer_attention")
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("dot_product", "fixed_random", "salience")])
@pytest.mark.parametrize("model_type", HEADS)
def test_every_variant_gets_nearer_to_its_teacher(model_type: str, variant: str) -> None:
    teacher, batches = sharp(HEADS[model_type]), loader(HEADS[model_type])
    model = student_of(teacher, variant)
    report = transfer_attention(model, teacher, batches, steps=(15, 0), learning_rate=1e-2, progress=False)
    assert sum(layer.after for layer in report.layers) < sum(layer.before for layer in report.layers)
    report = transfer_attention(model, teacher, batches, "distill", steps=(0, 15), progress=False)
    assert report.error_after < max(report.error_before, 1e-6)  # a mixture with dot_product is there already
    assert {layer.label for layer in report.layers} >= {"encoder.0", "encoder.1"}


def test_layers_that_start_at_their_closed_form_of_dense_train_at_a_fifth_of_the_rate() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    before = student_of(teacher, {0: "dense", 1: "factorized_random"})
    after = copy.deepcopy(before)
    transfer_attention(before, teacher, batches, steps=(0, 0), progress=False)
    transfer_attention(after, teacher, batches, steps=(1, 0), learning_rate=1e-3, progress=False)
    moved = [
        max((new - old).abs().max().item() for new, old in zip(a.parameters(), b.parameters(), strict=True))
        for a, b in zip(self_attentions(after), self_attentions(before), strict=True)
    ]
    assert moved == pytest.approx([2e-4, 1e-3], rel=0.05)  # Adam's first step is the rate


def test_stage_one_leaves_the_pretrained_weights_alone() -> None:
    teacher = sharp(HEADS["bert"])
    model = student_of(teacher, "dense+salience")
    transfer_attention(model, teacher, loader(HEADS["bert"]), steps=(5, 0), progress=False)
    theirs = teacher.state_dict()
    for name, tensor in model.state_dict().items():
        if ".synthesizer." not in name and not name.endswith("self.query.weight"):  # a guard in one of them
            assert torch.equal(tensor, theirs[name]), name


def test_the_teacher_and_all_modes_are_left_as_they_were() -> None:
    teacher = sharp(HEADS["bert"]).train()
    before = copy.deepcopy(teacher.state_dict())
    model = student_of(teacher, "dense")
    model.bert.embeddings.word_embeddings.weight.requires_grad = False
    transfer_attention(model, teacher, loader(HEADS["bert"]), steps=4, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert all(module.training for module in (*teacher.modules(), *model.modules()))
    assert teacher.config._attn_implementation == model.config._attn_implementation == "sdpa"
    trainable = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert trainable == {"bert.embeddings.word_embeddings.weight"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_bare_teacher_can_teach_a_model_with_a_head() -> None:
    teacher = sharp(HEADS["bert"])
    model = student_of(teacher, "random")
    report = transfer_attention(model, teacher.bert, loader(HEADS["bert"]), steps=4, progress=False)
    assert report.error_after < report.error_before


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_stage_three_learns_what_the_head_says(head: str) -> None:
    teacher, batches = sharp(head), loader(head)
    model = student_of(teacher, "random")
    without = copy.deepcopy(model)
    rates = {"learning_rate": 2e-2, "backbone_learning_rate": 3e-3}
    report = transfer_attention(model, teacher, batches, steps=(3, 6, 30), progress=False, **rates)
    assert report.steps == 39 and report.answers_after < 0.7 * report.answers_before
    assert "answers, squared error relative to their squares" in str(report)
    short = transfer_attention(without, teacher, batches, steps=(3, 6), progress=False)
    assert short.answers_after is None and "answers" not in str(short)


def test_answers_are_compared_over_classes_rows_and_tokens() -> None:
    """|student − teacher|² / |teacher|², the mean over classes taken off, padding left out; one row will do."""
    teacher, model = (
        build("BertForTokenClassification", num_labels=3),
        build("BertForTokenClassification", num_labels=3),
    )
    inputs = batch("BertForTokenClassification", padding="right")
    with torch.no_grad():
        ours, theirs = (one.eval()(**inputs).logits for one in (model, teacher))
        error = square = 0.0
        for row, column in inputs["attention_mask"].nonzero().tolist():
            a, b = (logits[row, column] - logits[row, column].mean() for logits in (ours, theirs))
            error, square = error + (a - b).square().sum(), square + b.square().sum()
        torch.testing.assert_close(answer_loss(model, teacher, inputs), error / square)
        model.classifier.bias += 5.0
        torch.testing.assert_close(answer_loss(model, teacher, inputs), error / square)
        regression = build(HEADS["bert"], num_labels=1)
        one = {name: tensor[:1] for name, tensor in inputs.items()}
        assert answer_loss(regression, copy.deepcopy(regression), one) == 0


@pytest.mark.parametrize(("teacher", "says"), [("bare", "BertModel gives no logits"), ("three labels", r"\(3, 3\)")])
def test_stage_three_without_the_same_head_is_refused_before_anything_is_done(teacher: str, says: str) -> None:
    stock = sharp(HEADS["bert"])
    model = student_of(stock, "random")
    before = copy.deepcopy(model.state_dict())
    other = stock.bert if teacher == "bare" else build(HEADS["bert"], num_labels=3)
    with pytest.raises(InvalidConfigError, match=says):
        transfer_attention(model, other, loader(HEADS["bert"]), steps=(1, 1, 1), progress=False)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.feature("transfer_attention", kinds=["hybrids"])
def test_a_hybrid_is_taught_where_it_is_synthesized() -> None:
    teacher = sharp(HEADS["bert"])
    report = transfer_attention(
        student_of(teacher, {1: "dense"}), teacher, loader(HEADS["bert"]), steps=4, progress=False
    )
    assert [layer.label for layer in report.layers] == ["encoder.1"]


def test_mixed_precision() -> None:
    teacher = sharp(HEADS["bert"])
    report = transfer_attention(
        student_of(teacher, "dense+salience"),
        teacher,
        loader(HEADS["bert"]),
        steps=20,
        learning_rate=1e-2,
        autocast=torch.bfloat16,
        progress=False,
    )
    assert report.error_after < report.error_before


def test_the_report_prints_a_table_and_names_the_worst_layer() -> None:
    teacher = sharp(HEADS["bert"])
    report = transfer_attention(student_of(teacher, "dense"), teacher, loader(HEADS["bert"]), steps=2, progress=False)
    text = str(report)
    assert "encoder.0" in text and "divergence before" in text and "2 steps" in text
    assert f"loses most: {report.worst[0].label}" in text
    assert report.worst[0].after >= report.worst[1].after


# ---- resuming ---------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class InterruptedAfter:
    """A dataloader that gives up once in all its batches."""

    def __init__(self, dataloader, batches: int):
        self.dataloader, self.left = dataloader, batches

    def __iter__(self):
        for inputs in self.dataloader:
            if self.left == 0:
                raise Interrupted
            self.left -= 1
            yield inputs


@pytest.mark.parametrize("after", [13, 23, 33], ids=["in stage 1", "in stage 2", "in stage 3"])
def test_a_resumed_transfer_ends_where_an_uninterrupted_one_does(tmp_path, after: int) -> None:
    teacher = sharp(HEADS["bert"])
    rows = [
        {name: tensor[row] for name, tensor in inputs.items()} for inputs in loader(HEADS["bert"]) for row in range(3)
    ]
    settings = dict(steps=(10, 10, 10), save_steps=3, progress=False)

    def shuffled():
        torch.manual_seed(1)
        return DataLoader(rows, batch_size=3, shuffle=True)

    whole = student_of(teacher, "random+salience")
    start = copy.deepcopy(whole)
    expected = transfer_attention(whole, teacher, shuffled(), **settings)

    first = copy.deepcopy(start)
    with pytest.raises(Interrupted):
        transfer_attention(first, teacher, InterruptedAfter(shuffled(), after), checkpoint_dir=tmp_path, **settings)
    second = copy.deepcopy(start)
    report = transfer_attention(second, teacher, shuffled(), checkpoint_dir=tmp_path, **settings)
    for (name, ours), theirs in zip(second.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    assert report.error_after == pytest.approx(expected.error_after, rel=1e-4)

    third = copy.deepcopy(start)  # a finished one is only loaded
    assert transfer_attention(third, teacher, [], checkpoint_dir=tmp_path, **settings) == report
    torch.testing.assert_close(third.state_dict(), second.state_dict())


def test_a_checkpoint_of_other_settings_is_refused(tmp_path) -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    transfer_attention(
        student_of(teacher, "dense"), teacher, batches, steps=2, checkpoint_dir=tmp_path, progress=False
    )
    with pytest.raises(CheckpointMismatchError, match=r"steps = \[0, 2, 0\], but this one has \[1, 3, 0\]"):
        transfer_attention(
            student_of(teacher, "dense"), teacher, batches, steps=4, checkpoint_dir=tmp_path, progress=False
        )


# ---- suggest_layers ---------------------------------------------------------------------------------------------


def test_a_suggestion_is_a_hybrid_for_patch_model() -> None:
    teacher = sharp(HEADS["bert"])
    before = copy.deepcopy(teacher.state_dict())
    suggestion = suggest_layers(teacher, loader(HEADS["bert"]), "random", budget=1, steps=0, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert len(suggestion) == 1 and set(suggestion.costs) == {"encoder.0", "encoder.1"}
    cheapest = min(suggestion.costs, key=suggestion.costs.__getitem__)
    assert suggestion == {int(cheapest[-1]): "random"}
    assert "leave stock" in str(suggestion)
    assert len(self_attentions(patch_model(teacher, suggestion))) == 1


def test_a_layer_that_attends_evenly_is_the_cheapest_to_synthesize() -> None:
    teacher = sharp(HEADS["bert"])
    with torch.no_grad():
        teacher.bert.encoder.layer[1].attention.self.query.weight.zero_()
        teacher.bert.encoder.layer[1].attention.self.query.bias.zero_()
    suggestion = suggest_layers(teacher, loader(HEADS["bert"]), "random", budget=0.5, steps=0, progress=False)
    assert list(suggestion) == [1] and suggestion.costs["encoder.1"] < 1e-3 < suggestion.costs["encoder.0"]


def test_suggestions_for_two_stacks_name_them() -> None:
    teacher = sharp("T5ForConditionalGeneration")
    suggestion = suggest_layers(teacher, loader(HEADS["t5"]), "dense", budget=3, steps=3, progress=False)
    assert len(suggestion) == 3 and all(key.partition(".")[0] in ("encoder", "decoder") for key in suggestion)
    patch_model(teacher, suggestion)


@pytest.mark.parametrize("budget", [0, 3, 0.0, 1.5, True])
def test_a_budget_out_of_range(budget) -> None:
    with pytest.raises(InvalidConfigError, match="budget must be a share"):
        suggest_layers(build(HEADS["bert"]), loader(HEADS["bert"]), "random", budget=budget)


# ---- what is refused --------------------------------------------------------------------------------------------


def test_errors_say_what_to_do() -> None:
    teacher, batches = build(HEADS["bert"]), loader(HEADS["bert"])
    dense = student_of(teacher, "dense")
    factorized = student_of(teacher, "factorized_dense", share_heads=True)
    with pytest.raises(InvalidConfigError, match="method must be one of auto, average, distill"):
        transfer_attention(dense, teacher, batches, method="magic")
    with pytest.raises(InvalidConfigError, match=r"'encoder\.0' is 'factorized_dense'. Use method='auto'"):
        transfer_attention(factorized, teacher, batches, method="average")
    with pytest.raises(InvalidConfigError, match="steps must be"):
        transfer_attention(dense, teacher, batches, steps=-1)
    for steps in ((1, 2, 3, 4), "many", None):
        with pytest.raises(InvalidConfigError, match="steps must be"):
            transfer_attention(dense, teacher, batches, steps=steps)
    with pytest.raises(NotPatchedError, match="call patch_model"):
        transfer_attention(copy.deepcopy(teacher), teacher, batches)
    with pytest.raises(UnsupportedModelError, match="its own teacher"):
        transfer_attention(dense, dense, batches)
    with pytest.raises(UnsupportedModelError, match="t5 model"):
        transfer_attention(dense, build(HEADS["t5"]), batches)
    with pytest.raises(UnsupportedModelError, match="no layer 'encoder.1'"):
        transfer_attention(dense, build(HEADS["bert"], num_hidden_layers=1), batches)
    with pytest.raises(UnsupportedModelError, match="heads"):
        transfer_attention(dense, build(HEADS["bert"], num_attention_heads=2), batches)
    with pytest.raises(InvalidConfigError, match="yields no batch"):
        transfer_attention(dense, teacher, [], progress=False)
    with pytest.raises(InvalidConfigError, match="must yield dicts"):
        transfer_attention(dense, teacher, [torch.ones(2, 3)], progress=False)
    with pytest.raises(AlreadyPatchedError):
        suggest_layers(dense, batches, "random")


def test_left_padding_is_refused_where_places_must_be_positions() -> None:
    teacher, inputs = build(HEADS["bert"]), batch(HEADS["bert"], padding="left")
    with pytest.raises(InvalidConfigError, match="padding_side = 'right'"):
        transfer_attention(student_of(teacher, "random"), teacher, [inputs], method="average", progress=False)
