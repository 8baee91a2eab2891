"""Any sum of forms with a mask and values, as the reference computes it: what each route is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from hf_synthesizer.attend import ROUTES, reference
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits.forms import Explicit, KeyBias, Logits, LowRank, Placed, Static, Sum, Tiled
from hf_synthesizer.logits.masks import AttentionMask
from tests.helpers.models import mask as key_mask

FORMS = ("static", "static_product", "low_rank", "low_rank_shared", "biased", "tiled", "salience", "explicit")
FORMS += ("placed_table", "placed_columns")
MASKS = ("none", "right", "left", "full", "causal", "causal-left", "scattered", "bias", "position")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def make_form(name: str, batch: int, heads: int, query: int, key: int, dtype: torch.dtype) -> Logits:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).div(2).to(dtype).requires_grad_()

    if name == "static":
        return Static(tensor(heads, query + 2, key + 3)[:, :query, :key])  # strided, as the slice of a longer table
    if name == "static_product":
        return Static(tensor(heads, query + 2, 3)[:, :query], tensor(heads, key, 3))
    if name == "low_rank":
        return LowRank(tensor(batch, query, heads, 4).transpose(1, 2), tensor(batch, key, heads, 4).transpose(1, 2))
    if name == "low_rank_shared":
        return LowRank(tensor(batch, heads, query, 4), tensor(1, heads, key, 4))
    if name == "biased":
        return LowRank(tensor(batch, heads, query, 4), tensor(1, heads, key, 4), tensor(1, heads, key))
    if name == "tiled":
        return Tiled(tensor(batch, heads, query, 3), tensor(batch, heads, query, -(-key // 3)), key)
    if name == "salience":
        return KeyBias(tensor(batch, heads, 1, key), query)
    if name == "placed_table":
        positions = [torch.randint(0, 4, (batch, length)) for length in (key, query)]
        return Placed(Static(tensor(heads, 4, 4)), *positions)
    if name == "placed_columns":
        columns = Tiled(tensor(batch, heads, query, 3), tensor(batch, heads, query, 2), 5)
        return Placed(columns, torch.randint(0, 5, (batch, key)))
    return Explicit(tensor(batch, heads, query, key))


def make_logits(names: list[str], weighted: bool, *shape, dtype: torch.dtype) -> Logits:
    forms = [make_form(name, *shape, dtype) for name in names]
    if len(forms) == 1 and not weighted:
        return forms[0]
    heads = shape[1]
    return Sum([(torch.randn(heads, dtype=dtype, requires_grad=True) if weighted else None, form) for form in forms])


def make_mask(name: str, batch: int, heads: int, query: int, key: int, dtype: torch.dtype) -> AttentionMask:
    if name in ("right", "left", "full"):
        keep = key_mask(batch, key, name).bool()[:, None, None, :]
        return AttentionMask.from_tensor(keep.expand(batch, 1, query, key).contiguous()).simplified()
    if name == "causal":
        return AttentionMask(causal_offset=key - query)
    if name == "causal-left":
        keep = key_mask(batch, key, "left").bool()[:, None, None, :] & torch.ones(query, key).tril(key - query).bool()
        return AttentionMask.from_tensor(keep).simplified()
    if name == "scattered":
        return AttentionMask.from_tensor(torch.rand(batch, 1, query, key) > 0.4)
    if name == "bias":
        return AttentionMask.from_tensor(torch.randn(batch, 1, query, key, dtype=dtype))
    if name == "position":
        return AttentionMask(bias=torch.randn(1, heads, query, key, dtype=dtype, requires_grad=True))
    return AttentionMask()


def leaves(*objects) -> list[torch.Tensor]:
    """All tensors that want a gradient behind forms, masks and values, in a fixed order."""
    tensors: list[torch.Tensor] = []
    for item in objects:
        if isinstance(item, torch.Tensor):
            while item._base is not None:
                item = item._base
            tensors += [item] if item.requires_grad else []
        elif isinstance(item, (list, tuple)):
            tensors += leaves(*item)
        elif isinstance(item, (Logits, AttentionMask)):
            tensors += leaves(*vars(item).values())
    return tensors


@st.composite
def problems(draw, dtypes: list[torch.dtype], **sizes: list[int]) -> dict[str, Any]:
    """Facts of a problem; `sizes` are those of the blocks in which a route works."""
    query = draw(st.integers(1, 9))
    return {
        "names": draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3, unique=True)),
        "weighted": draw(st.booleans()),
        "mask": draw(st.sampled_from(MASKS)),
        "shape": (draw(st.integers(1, 3)), draw(st.integers(1, 5)), query, query + draw(st.integers(0, 4))),
        "width": draw(st.sampled_from([3, 4, 6])),
        "dtype": draw(st.sampled_from(dtypes)),
        **{name: draw(st.sampled_from(choices)) for name, choices in sizes.items()},
        "seed": draw(st.integers(0, 1000)),
    }


@dataclass
class Posed:
    """A problem with its numbers, and what the reference makes of them."""

    logits: Logits
    mask: AttentionMask
    value: torch.Tensor
    inputs: list[torch.Tensor]
    upstream: torch.Tensor
    output: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(cls, problem: dict[str, Any]) -> Posed:
        torch.manual_seed(problem["seed"])
        shape, dtype = problem["shape"], problem["dtype"]
        logits = make_logits(problem["names"], problem["weighted"], *shape, dtype=dtype)
        mask = make_mask(problem["mask"], *shape, dtype)
        batch, heads, _, key = shape
        value = torch.randn(batch, key, heads, problem["width"], dtype=dtype, requires_grad=True).transpose(1, 2)
        inputs = leaves(logits, mask, value)
        output, _ = reference.reference_attention(logits, value, mask)
        upstream = torch.randn_like(output)
        gradients = torch.autograd.grad(output, inputs, upstream, allow_unused=True)
        return cls(logits, mask, value, inputs, upstream, output.detach(), gradients)

    def check(self, name: str) -> None:
        """If the route of that name serves the problem, its output and its gradients equal the reference's."""
        route = ROUTES[name]
        dtype = self.value.dtype
        tolerance, scale = TOLERANCE[dtype], max(1.0, float(self.output.abs().max()))
        terms = Terms.of(self.logits, self.mask)
        if not route.serves(terms, self.value, self.mask, 0.0):
            return
        actual = route.attention(terms, self.value, self.mask)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, self.output, rtol=tolerance, atol=tolerance * scale, msg=name)
        with torch.no_grad():
            without_gradient = route.attention(Terms.of(self.logits, self.mask), self.value, self.mask)
        torch.testing.assert_close(without_gradient, self.output, rtol=tolerance, atol=tolerance * scale, msg=name)
        gradients = torch.autograd.grad(actual, self.inputs, self.upstream, allow_unused=True, retain_graph=True)
        for gradient, expected in zip(gradients, self.gradients, strict=True):
            if expected is not None:
                size = max(1.0, float(expected.abs().max()))
                loose = 10 * tolerance * size if dtype != torch.bfloat16 else 0.1 * size
                torch.testing.assert_close(gradient, expected, rtol=10 * tolerance, atol=loose, msg=name)
