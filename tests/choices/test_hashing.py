"""The transforms of the hashing variants keep the laws of their papers, and more hashes find more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_synthesizer.choices.hashing import Buckets
from hf_synthesizer.synthesizers import lsh
from tests.helpers import naive_choices

TRANSFORMS = {
    "lsh_simple": lsh.simple_lsh,
    "alsh_simple": lsh.simple_alsh,
    "alsh_xbox": lsh.xbox,
    "alsh_xbox qnf": lsh.xbox_normalised,
    "alsh_sign": lsh.sign_alsh,
    "alsh_sign qnf": lsh.sign_alsh_normalised,
}


def transformed(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q(q), P(k) and the inner products `q · k`, of queries and keys of all lengths up to M."""
    query, key = (torch.randn(count, 8).double() * torch.rand(count, 1).double() * 3 for count in (40, 60))
    bound = torch.cat((query, key)).norm(dim=-1).max().view(1, 1)
    return *TRANSFORMS[name](query, key, bound), query @ key.mT


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformed_inner_products_rank_keys_as_the_original_ones_do(name: str) -> None:
    asked, stored, products = transformed(name)
    assert torch.equal((asked @ stored.mT).argsort(-1), products.argsort(-1))


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if "sign" not in name])
def test_distance_and_cosine_rank_keys_as_inner_products_do(name: str) -> None:
    """Exactly, because all transformed keys are equally long."""
    asked, stored, products = transformed(name)
    torch.testing.assert_close(stored.norm(dim=-1), stored.norm(dim=-1)[:1].expand(60))
    assert torch.equal((-torch.cdist(asked, stored)).argsort(-1), products.argsort(-1))
    cosine = torch.nn.functional.normalize(asked, dim=-1) @ torch.nn.functional.normalize(stored, dim=-1).mT
    assert torch.equal(cosine.argsort(-1), products.argsort(-1))


@pytest.mark.parametrize("name", ["alsh_sign", "alsh_sign qnf"])
def test_sign_alsh_errs_by_no_more_than_the_paper_says(name: str) -> None:
    """‖P(k)‖² = m/4 + ‖y‖^2^(m+1) with ‖y‖ ≤ U = ¾: distances order keys wrongly only within U⁸ ≈ 0.1 of each other."""
    asked, stored, _ = transformed(name)
    y = stored[:, :8]
    torch.testing.assert_close(stored.square().sum(-1), 0.5 + y.norm(dim=-1) ** 8)
    assert y.norm(dim=-1).max() <= 0.75 + 1e-9
    distance = torch.cdist(asked, stored).square()
    exact = 0.5 + asked.square().sum(-1, keepdim=True) - 2 * asked[:, :8] @ y.mT
    assert (distance - exact).min() >= -1e-9 and (distance - exact).max() <= 0.75**8 + 1e-9


@pytest.mark.parametrize("name", TRANSFORMS)
def test_more_hashes_find_more_of_the_best_keys(name: str) -> None:
    x = torch.randn(4, 256, 16) * (0.5 + torch.rand(4, 256, 1))
    products = x @ x.mT
    best = products.topk(32).indices
    recalls = []
    for count in (1, 2, 4, 8, 16):
        width = 16 + (2 if "sign" in name or name == "alsh_simple" else 1)
        rule = Buckets(TRANSFORMS[name], torch.randn(count, width, width), 32)
        actual = rule.chosen(x[:, None], x[:, None], whole(256), False)[:, 0]
        assert (actual.sum(-1) <= 32).all()
        recalls.append(actual.gather(-1, best).float().mean().item())
    assert recalls == sorted(recalls) and recalls[0] > 1.5 * 32 / 256 and recalls[-1] > 0.8, recalls


def whole(length: int) -> Any:
    from hf_synthesizer.logits.tokens import Tokens

    return Tokens(length, length, 0, None)


def test_the_naive_transforms_are_the_papers() -> None:
    """A check of the loops themselves: `Q · P` is `q · k` up to a factor of the query."""
    q, k, m = np.array([0.3, -1.0]), np.array([1.5, 0.2]), 2.0
    for variant, factor in {"lsh_simple": m * np.linalg.norm(q), "alsh_simple": m * m, "alsh_xbox": 1}.items():
        actual = naive_choices.transformed_query(variant, q, m, False) @ naive_choices.transformed_key(variant, k, m)
        assert actual * factor == pytest.approx(q @ k)
