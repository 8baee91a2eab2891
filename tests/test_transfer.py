"""transfer_attention and suggest_layers: closed forms, distillation, resuming, and what is refused."""

from __future__ import annotations

import copy
import itertools
import math

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
from hf_synthesizer.transfer import closed_forms, first_order
from hf_synthesizer.transfer.average import MeanWeights, best_factors
from hf_synthesizer.transfer.first_order import MeanStates
from hf_synthesizer.transfer.observe import observe_calls, observing, pair_layers
from tests.models import MAX_LENGTH, VARIANTS, batch, build, first_output, mask

HEADS = {"bert": "BertForSequenceClassification", "t5": "T5ForConditionalGeneration"}


def loader(head: str, count: int = 4, length: int = 8) -> list[dict[str, torch.Tensor]]:
    batches = []
    for _ in range(count):
        inputs = batch(head, length)
        inputs["attention_mask"] = mask(3, length, "right")
        batches.append(inputs)
    return batches


def sharp(head: str):
    """A model whose attention is far from uniform, so that there is something to transfer."""
    model = build(head)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight", "SelfAttention.q.weight", "SelfAttention.k.weight")):
                parameter.mul_(3)
    return model


def student_of(teacher, variant, **options):
    return patch_model(copy.deepcopy(teacher), variant, **options)


def self_attentions(model, kind=None):
    return [m for m in model.modules() if hasattr(m, "synthesizer") and (kind is None or isinstance(m, kind))]


def recorded_weights(teacher, inputs) -> list[torch.Tensor]:
    teacher.set_attn_implementation("eager")
    with torch.no_grad():
        weights = teacher(**inputs, output_attentions=True).attentions
    teacher.set_attn_implementation("sdpa")
    return list(weights)


# ---- average: closed forms --------------------------------------------------------------------------------------


def test_random_is_the_log_of_the_mean_weight_over_valid_pairs() -> None:
    """R[h, i, j] = log(Σ_b w[b,h,i,j] / #b), over the sequences in which i and j are both tokens."""
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, batches, method="average", progress=False)
    weights = [recorded_weights(teacher, inputs) for inputs in batches]  # [batch][layer] (B, H, L, L)
    for number, layer in enumerate(self_attentions(model)):
        for head, i, j in itertools.product(range(3), range(8), range(8)):
            seen = [
                weights[number_of_batch][number][row, head, i, j].item()
                for number_of_batch, inputs in enumerate(batches)
                for row in range(3)
                if inputs["attention_mask"][row, i] and inputs["attention_mask"][row, j]
            ]
            expected = math.log(sum(seen) / len(seen))
            assert layer.synthesizer.table[head, i, j].item() == pytest.approx(expected, abs=1e-5)


def test_constant_attention_is_the_mean_attention() -> None:
    teacher, inputs = sharp(HEADS["bert"]), batch(HEADS["bert"])
    inputs["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, [inputs], method="average", progress=False)
    ours, theirs = recorded_weights(model, inputs), recorded_weights(teacher, inputs)
    torch.testing.assert_close(ours[0], theirs[0].mean(0, keepdim=True).expand_as(ours[0]), rtol=1e-4, atol=1e-5)


def test_pairs_that_no_sequence_reached_go_on_along_their_diagonal() -> None:
    means = MeanWeights(1, 4)
    means.sum[0, :2, :2] = torch.tensor([[3.0, 1.0], [2.0, 2.0]])
    means.count[:2, :2] = 4
    weights = means.log().exp()[0]
    assert weights[0, 1].item() == pytest.approx(0.25)  # seen: as it is
    assert weights[2, 2].item() == pytest.approx(5 / 8)  # the mean of its diagonal
    assert weights[3, 2].item() == pytest.approx(0.5) and weights[3, 0].item() == pytest.approx(0.5)  # the nearest one
    assert torch.isfinite(MeanWeights(2, 3).log()).all()


def test_factorized_random_takes_the_best_factors() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    full, thin = student_of(teacher, "random"), student_of(teacher, "factorized_random", rank=MAX_LENGTH)
    for model in (full, thin):
        transfer_attention(model, teacher, batches, method="average", progress=False)
    for table, factors in zip(self_attentions(full), self_attentions(thin), strict=True):
        product = factors.synthesizer.query_factor @ factors.synthesizer.key_factor.transpose(-1, -2)
        torch.testing.assert_close(product.softmax(-1), table.synthesizer.table.softmax(-1), rtol=1e-3, atol=1e-5)


def test_best_factors_are_those_of_the_singular_values() -> None:
    query, key = torch.randn(2, 6, 2).double(), torch.randn(2, 6, 2).double()
    logits = query @ key.transpose(-1, -2)
    left, right = best_factors(logits + torch.randn(2, 6, 1), rank=3)
    difference = left @ right.transpose(-1, -2) - logits
    torch.testing.assert_close(difference, difference.mean(-1, keepdim=True).expand_as(difference))


@pytest.mark.parametrize("mixing", ["softmax", "sum"])
def test_a_mixture_with_dot_product_starts_as_its_teacher(mixing: str) -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    model = student_of(teacher, "random+dot_product", mixing=mixing)
    report = transfer_attention(model, teacher, batches, steps=10, progress=False)
    with torch.no_grad():
        torch.testing.assert_close(
            first_output(model(**batches[0])), first_output(teacher(**batches[0])), rtol=1e-4, atol=1e-4
        )
    assert report.steps == 0  # nothing was left to distill


def test_t5_takes_its_mean_weights_on_top_of_the_position_bias() -> None:
    """The bias stays and is added, so R is what is missing from it: softmax(R + bias) is the mean."""
    teacher, inputs = sharp("T5EncoderModel"), batch("T5EncoderModel")
    inputs["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, [inputs], method="average", progress=False)
    ours, theirs = recorded_weights(model, inputs), recorded_weights(teacher, inputs)
    torch.testing.assert_close(ours[0], theirs[0].mean(0, keepdim=True).expand_as(ours[0]), rtol=1e-4, atol=1e-5)


def test_shared_heads_take_the_mean_over_the_heads() -> None:
    teacher, inputs = sharp(HEADS["bert"]), batch(HEADS["bert"])
    inputs["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
    model = student_of(teacher, "random", share_heads=True)
    transfer_attention(model, teacher, [inputs], method="average", progress=False)
    expected = recorded_weights(teacher, inputs)[0].mean((0, 1))
    torch.testing.assert_close(recorded_weights(model, inputs)[0][0, 0], expected, rtol=1e-4, atol=1e-5)


def mean_states(model, teacher, inputs) -> MeanStates:
    """What the closed form knows of the first layer after one batch."""
    pair = pair_layers(model, teacher)[0]
    means = MeanStates(pair)
    with observing(teacher, backend="eager"):
        means.add(observe_calls(teacher, [pair], inputs)[pair.label])
    return means


def test_dense_and_salience_take_the_logits_with_the_mean_on_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """S[h, i, j] = s · ((q_i − q̄) · k̄_j + q̄ · k_j) up to a constant a row; k̄_j over the tokens at j, q̄ over all."""
    monkeypatch.setattr(first_order, "SPREAD", 9.0)  # no hidden unit reaches relu's corner
    monkeypatch.setattr(closed_forms, "SCALES", (1.0,))
    teacher, inputs = sharp(HEADS["bert"]), loader(HEADS["bert"], count=1)[0]
    model = student_of(teacher, "dense+salience")
    transfer_attention(model, teacher, [inputs], method="average", progress=False)
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        stock = teacher.bert.encoder.layer[0].attention.self
        states = teacher.bert.embeddings(inputs["input_ids"], inputs.get("token_type_ids"))
        query, key = (project(states).view(3, 8, 3, -1) for project in (stock.query, stock.key))  # (B, L, H, d_h)
        mean_query = query[tokens].mean(0)
        ours = recorded_weights(model, inputs)[0]
    for row, head, i in itertools.product(range(3), range(3), range(8)):
        if not tokens[row, i]:
            continue
        logits = []
        for j in range(int(tokens[row].sum())):
            mean_key = torch.stack([key[b, j, head] for b in range(3) if tokens[b, j]]).mean(0)
            seen = (query[row, i, head] - mean_query[head]) @ mean_key + mean_query[head] @ key[row, j, head]
            logits.append(seen * stock.scaling)
        expected = torch.stack(logits).softmax(0)
        torch.testing.assert_close(ours[row, head, i, : len(logits)], expected, rtol=1e-3, atol=1e-5)


def test_a_table_beside_salience_is_still_the_mean_weight_where_salience_is_at_its_mean() -> None:
    teacher, inputs = sharp(HEADS["bert"]), batch(HEADS["bert"])
    inputs["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
    alone, beside = student_of(teacher, "random"), student_of(teacher, "random+salience")
    for model in (alone, beside):
        transfer_attention(model, teacher, [inputs], method="average", progress=False)
    parts = self_attentions(beside)[0].synthesizer.parts
    states = mean_states(beside, teacher, inputs).positions().float()  # (N, d)
    said = parts["salience"].worth(states).T.unsqueeze(1)  # (H, 1, N)
    expected = self_attentions(alone)[0].synthesizer.table
    torch.testing.assert_close((parts["random"].table + said)[:, :8, :8], expected[:, :8, :8], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("variant", ["dense", "dense+salience", "random+salience"])
def test_the_closed_forms_alone_bring_a_model_nearer(family: str, variant: str) -> None:
    teacher, batches = sharp(HEADS[family]), loader(HEADS[family])
    model = student_of(teacher, variant)
    report = transfer_attention(model, teacher, batches, method="average", progress=False)
    assert sum(layer.after for layer in report.layers) < 0.97 * sum(layer.before for layer in report.layers)


# ---- distill ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("dot_product", "fixed_random", "salience")])
@pytest.mark.parametrize("family", HEADS)
def test_every_variant_gets_nearer_to_its_teacher(family: str, variant: str) -> None:
    teacher, batches = sharp(HEADS[family]), loader(HEADS[family])
    model = student_of(teacher, variant)
    report = transfer_attention(model, teacher, batches, steps=(15, 0), learning_rate=1e-2, progress=False)
    assert sum(layer.after for layer in report.layers) < sum(layer.before for layer in report.layers)
    report = transfer_attention(model, teacher, batches, "distill", steps=(0, 15), progress=False)
    assert report.error_after < max(report.error_before, 1e-6)  # a mixture with dot_product is there already
    assert {layer.label for layer in report.layers} >= {"encoder.0", "encoder.1"}


def test_layers_that_start_at_their_closed_form_of_dense_train_at_a_fifth_of_the_rate() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    before = student_of(teacher, {0: "dense", 1: "factorized_dense"})
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
        if ".synthesizer." not in name:
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


@pytest.mark.parametrize("after", [13, 23], ids=["in stage 1", "in stage 2"])
def test_a_resumed_transfer_ends_where_an_uninterrupted_one_does(tmp_path, after: int) -> None:
    teacher = sharp(HEADS["bert"])
    rows = [
        {name: tensor[row] for name, tensor in inputs.items()} for inputs in loader(HEADS["bert"]) for row in range(3)
    ]
    settings = dict(steps=(10, 10), save_steps=3, progress=False)

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
    with pytest.raises(CheckpointMismatchError, match=r"steps = \[0, 2\], but this one has \[1, 3\]"):
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
    factorized = student_of(teacher, "factorized_dense")
    with pytest.raises(InvalidConfigError, match="method must be one of auto, average, distill"):
        transfer_attention(dense, teacher, batches, method="magic")
    with pytest.raises(InvalidConfigError, match=r"'encoder\.0' is 'factorized_dense'. Use method='auto'"):
        transfer_attention(factorized, teacher, batches, method="average")
    with pytest.raises(InvalidConfigError, match="steps must be"):
        transfer_attention(dense, teacher, batches, steps=-1)
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
