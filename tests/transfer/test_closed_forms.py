"""What a transfer takes from its teacher in one pass: mean weights, best factors, first-order terms."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_synthesizer import InvalidConfigError, SynthesizerConfig, transfer_attention
from hf_synthesizer.synthesizers import FactorizedDenseSynthesizer, statistics
from hf_synthesizer.synthesizers.factorized_random import best_factors
from hf_synthesizer.synthesizers.statistics import MeanStates, MeanWeights, TeacherLayer
from hf_synthesizer.transfer import closed_forms
from hf_synthesizer.transfer.observe import observe_calls, observing, pair_layers
from tests.helpers.models import MAX_LENGTH, batch, first_output
from tests.helpers.teaching import HEADS, loader, recorded_weights, self_attentions, sharp, student_of


def averaged(head: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The first layer's weights (B, H, L, L) on a batch without padding: of `random` in closed form, and of its teacher."""
    teacher, inputs = sharp(head), batch(head)
    inputs["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
    model = student_of(teacher, "random", **options)
    transfer_attention(model, teacher, [inputs], method="average", progress=False)
    return recorded_weights(model, inputs)[0], recorded_weights(teacher, inputs)[0]


def test_random_gives_each_pair_the_weight_that_its_teacher_gives_it_on_the_mean() -> None:
    """Σ_b softmax(R + mask_b)[h, i, j] = Σ_b w[b, h, i, j] over sequences of several lengths: where the divergence is least."""
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    assert len({length for inputs in batches for length in inputs["attention_mask"].sum(-1).tolist()}) > 1
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, batches, method="average", progress=False)
    sums = []
    for one in (model, teacher):
        rows = [inputs["attention_mask"].unsqueeze(1).unsqueeze(-1) for inputs in batches]
        weights = [recorded_weights(one, inputs) for inputs in batches]  # [batch][layer] (B, H, L, L)
        sums.append(
            [
                sum((w[number] * row).sum(0) for w, row in zip(weights, rows, strict=True))
                for number in range(len(weights[0]))
            ]
        )
    for ours, theirs in zip(*sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_random_is_the_log_of_the_mean_weight_where_all_sequences_have_the_same_keys() -> None:
    teacher, inputs = sharp(HEADS["bert"]), batch(HEADS["bert"])
    inputs["attention_mask"] = torch.ones(3, 8, dtype=torch.long)
    model = student_of(teacher, "random")
    transfer_attention(model, teacher, [inputs], method="average", progress=False)
    for layer, weights in zip(self_attentions(model), recorded_weights(teacher, inputs), strict=True):
        torch.testing.assert_close(layer.synthesizer.table[:, :8, :8], weights.mean(0).log(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", [HEADS["bert"], "T5EncoderModel"])
def test_constant_attention_is_the_mean_attention(head: str) -> None:
    """T5's bias stays and is added, so R is what is missing from it: softmax(R + bias) is the mean."""
    ours, theirs = averaged(head)
    torch.testing.assert_close(ours, theirs.mean(0, keepdim=True).expand_as(ours), rtol=1e-4, atol=1e-5)


def test_pairs_that_no_sequence_reached_go_on_along_their_diagonal() -> None:
    means = MeanWeights(TeacherLayer(8, 1, 8, 4))
    means.sum[0, :2, :2] = torch.tensor([[3.0, 1.0], [2.0, 2.0]])
    means.before[0, :2, 1] = torch.tensor([3.0, 2.0])
    means.count[:2, :2] = 4
    weights = means.log().exp()[0]
    assert weights[0, 1].item() == pytest.approx(0.25)  # seen: as it is
    assert weights[2, 2].item() == pytest.approx(5 / 8)  # the mean of its diagonal
    assert weights[3, 2].item() == pytest.approx(0.5) and weights[3, 0].item() == pytest.approx(0.5)  # the nearest one
    assert torch.isfinite(MeanWeights(TeacherLayer(8, 2, 4, 3)).log()).all()


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


def test_shared_heads_take_the_mean_over_the_heads() -> None:
    ours, theirs = averaged(HEADS["bert"], share_heads=True)
    torch.testing.assert_close(ours[0, 0], theirs.mean((0, 1)), rtol=1e-4, atol=1e-5)


def mean_states(model, teacher, inputs) -> MeanStates:
    """What the closed form knows of the first layer after one batch."""
    pair = pair_layers(model, teacher)[0]
    part = closed_forms.parts_with_closed_form(pair.student.synthesizer)[0]
    means = MeanStates(closed_forms.teacher_layer(pair, part))
    with observing(teacher, backend="eager"):
        means.add(observe_calls(teacher, [pair], inputs)[pair.label][0])
    return means


def test_dense_and_salience_take_the_logits_with_the_mean_on_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """S[h, i, j] = s · ((q_i − q̄) · k̄_j + q̄ · k_j) up to a constant a row; k̄_j over the tokens at j, q̄ over all."""
    monkeypatch.setattr(statistics, "LIFT", 9.0)  # no hidden unit reaches relu's corner
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


@pytest.mark.parametrize("model_type", HEADS)
@pytest.mark.parametrize("variant", ["dense", "dense+salience", "random+salience"])
def test_the_closed_forms_alone_bring_a_model_nearer(model_type: str, variant: str) -> None:
    teacher, batches = sharp(HEADS[model_type]), loader(HEADS[model_type])
    model = student_of(teacher, variant)
    report = transfer_attention(model, teacher, batches, method="average", progress=False)
    assert sum(layer.after for layer in report.layers) < 0.97 * sum(layer.before for layer in report.layers)


def test_factorized_dense_takes_the_nearest_sum_of_a_fine_and_a_coarse_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a constant a row, and to what is small where the constant is large: `z_i · (F[j mod a] + G[j div a])`, the least
    squares of `dense`'s `z_i · k̄_j` over the tokens."""
    monkeypatch.setattr(statistics, "LIFT", 9.0)
    monkeypatch.setattr(closed_forms, "SCALES", (1.0,))
    monkeypatch.setattr(FactorizedDenseSynthesizer, "constants", (50.0,))
    teacher, inputs = sharp(HEADS["bert"]), loader(HEADS["bert"], count=1, length=12)[0]
    found = {}
    for variant, options in (("dense", {}), ("factorized_dense", {"factors": (6, 4)})):
        model = student_of(teacher, variant, **options)
        transfer_attention(model, teacher, [inputs], method="average", progress=False)
        synthesizer = self_attentions(model)[0].synthesizer.double()
        with torch.no_grad():
            states = teacher.bert.embeddings(inputs["input_ids"]).double()
            found[variant] = synthesizer(states).materialize()[..., :12]  # (B, H, L, L)
    count = inputs["attention_mask"].sum(0).double()
    place = torch.arange(12)
    which = torch.stack([*(place % 6 == m for m in range(6)), *(place // 6 == n for n in range(4))], -1).double()
    for wanted, ours in zip(found["dense"].flatten(0, 2), found["factorized_dense"].flatten(0, 2), strict=True):
        gram = which.T @ (count[:, None] * which) + 1e-9 * torch.eye(10, dtype=torch.float64)
        nearest = which @ torch.linalg.solve(gram, which.T @ (count * wanted))
        apart = (ours - nearest) - (ours - nearest).mean()
        assert apart.abs().max() < 0.02 * wanted.std() + 1e-3


def test_factorized_dense_starts_nearer_than_fresh_in_every_layer() -> None:
    teacher = sharp(HEADS["bert"])
    for variant in ("factorized_dense", "factorized_dense+salience"):
        report = transfer_attention(
            student_of(teacher, variant), teacher, loader(HEADS["bert"]), method="average", progress=False
        )
        assert all(layer.after < layer.before for layer in report.layers)


@pytest.mark.parametrize("variant", ["random", "random+salience", "dense", "dense+salience", "factorized_random"])
@pytest.mark.parametrize("head", [HEADS["bert"], HEADS["t5"]])
def test_some_heads_take_what_they_take_in_a_layer_of_their_own_kind(head: str, variant: str) -> None:
    teacher, batches = sharp(head), loader(head)
    whole = student_of(teacher, variant)
    some = student_of(teacher, SynthesizerConfig(variant, heads=[0, 2]))
    for model in (whole, some):
        report = transfer_attention(model, teacher, batches, method="average", progress=False)
    assert report.layers[0].variant == f"{variant} [0, 2]"
    for all_heads, group in zip(self_attentions(whole), self_attentions(some), strict=True):
        if variant == "factorized_random":  # its factors are free to turn
            wanted, found = (s.static_table() for s in (all_heads.synthesizer, group.synthesizer.groups["0"]))
            torch.testing.assert_close(found, wanted[[0, 2]], rtol=1e-3, atol=1e-3)
            continue
        theirs = all_heads.synthesizer.state_dict()
        for name, tensor in group.synthesizer.groups["0"].state_dict().items():
            rows = theirs[name].unflatten(0, (3, -1))[[0, 2]].flatten(0, 1)
            torch.testing.assert_close(tensor, rows, rtol=1e-5, atol=1e-6)


def test_distillation_of_groups_leaves_stage_one_to_what_is_new() -> None:
    teacher, batches = sharp(HEADS["bert"]), loader(HEADS["bert"])
    groups = [SynthesizerConfig("dense+salience", heads=[1]), SynthesizerConfig("random", heads=[2])]
    model = student_of(teacher, groups)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = transfer_attention(model, teacher, batches, steps=(3, 0), progress=False)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and all(".synthesizer.groups.0." in name or ".synthesizer.groups.1." in name for name in moved)
    assert all(layer.after < layer.before for layer in report.layers)
    with pytest.raises(InvalidConfigError, match="'encoder.0' is 'routing'"):
        routed = student_of(teacher, [SynthesizerConfig("routing", heads=[0])])
        transfer_attention(routed, teacher, batches, method="average", progress=False)
