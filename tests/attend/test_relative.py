"""Logits by distance and windows, against loops that are written from the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import hf_synthesizer.attend as package
from hf_synthesizer.attend import attend, band, native
from hf_synthesizer.attend.terms import Terms
from hf_synthesizer.logits.forms import KeyBias, Logits, LowRank, Sum
from hf_synthesizer.logits.masks import AttentionMask
from hf_synthesizer.logits.positions import Positions
from hf_synthesizer.logits.reach import Windowed
from hf_synthesizer.logits.relative import Relative


def loops(
    rows: np.ndarray,
    sinks: np.ndarray,
    salience: np.ndarray | None,
    value: np.ndarray,
    visible: np.ndarray,
    causal_rows: bool,
    window: int | None,
    window_sinks: int,
    causal: bool,
) -> np.ndarray:
    """softmax(T[h, clip(j − i, −D, D)] + F[h, j] + s[h, j]) · V for rows (B or 1, H, Lq or 1, columns), visible (B, L)."""
    batch, heads, length, width = value.shape
    furthest = rows.shape[-1] - 1 if causal_rows else rows.shape[-1] // 2
    output = np.zeros((batch, heads, length, width))
    for b in range(batch):
        first = int(np.argmax(visible[b])) if visible[b].any() else 0
        for h in range(heads):
            for i in range(length):
                logits = np.full(length, -np.inf)
                row = rows[b % len(rows), h, i % rows.shape[2]]
                for j in range(length):
                    number = j - first
                    near = window is None or abs(j - i) < window or 0 <= number < window_sinks
                    if not visible[b, j] or (causal and j > i) or not near:
                        continue
                    logits[j] = row[min(max(j - i, -furthest), 0 if causal_rows else furthest) + furthest]
                    if 0 <= number < sinks.shape[-1]:
                        logits[j] += sinks[h, number]
                    if salience is not None:
                        logits[j] += salience[b, h, 0, j]
                if np.isinf(logits).all():
                    continue
                weights = np.exp(logits - logits.max())
                output[b, h, i] = weights / weights.sum() @ value[b, h]
    return output


def visible_keys(padding: str, batch: int, length: int) -> torch.Tensor:
    keep = torch.ones(batch, length, dtype=torch.bool)
    for row in range(batch):
        hidden = min(row * 5, length - 1)
        if padding == "right" and hidden:
            keep[row, length - hidden :] = False
        if padding == "left":
            keep[row, :hidden] = False
    return keep


def case(
    length: int, distance: int, causal_rows: bool, sinks: int, dtype: torch.dtype, per_query: bool = False
) -> tuple[Relative, torch.Tensor, torch.Tensor]:
    batch, heads, width = 3, 2, 5
    columns = distance + 1 if causal_rows else 2 * distance + 1
    shape = (batch, heads, length, columns) if per_query else (1, heads, 1, columns)
    rows = torch.randn(*shape, dtype=dtype, requires_grad=True)
    first = torch.randn(heads, sinks, dtype=dtype, requires_grad=True)
    form = Relative(rows, Positions(length, length), causal_rows, first if sinks else None)
    value = torch.randn(batch, heads, length, width, dtype=dtype, requires_grad=True)
    salience = torch.randn(batch, heads, 1, length, dtype=dtype, requires_grad=True)
    return form, value, salience


ROUTES = ("band", "plain band", "native", "chunked")


@contextmanager
def only_route(name: str) -> Iterator[None]:
    """Within it, this route serves what it can, and plain operations the rest."""
    with pytest.MonkeyPatch.context() as patch:
        route = name.split()[-1]
        patch.setattr(package, "FAR_ROUTES", {route: package.FAR_ROUTES[route]})
        patch.setattr(package, "trains_on_few", lambda *_: False)
        if name == "plain band":
            patch.setattr(native, "serves", lambda *_: False)
        yield


TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 4e-2, torch.float16: 1e-2}


PROBLEMS = [
    # (length, D, sinks of the logits, with salience, rows for each query)
    (90, 7, 4, True, False),
    (67, 70, 2, False, False),
    (65, 200, 0, True, False),
    (70, 9, 3, True, True),
]


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length, distance, sinks, salient, per_query", PROBLEMS)
def test_every_route_equals_loops(window, padding, causal, length, distance, sinks, salient, per_query) -> None:
    torch.manual_seed(0)
    form, value, salience = case(length, distance, causal, sinks, torch.float64, per_query)
    window_sinks = 0 if window is None else 3
    keep = visible_keys(padding, len(value), length)
    mask = AttentionMask(keep[:, None, None, :] if padding != "none" else None, causal_offset=0 if causal else None)
    expected = loops(
        form.rows.detach().numpy(),
        np.zeros((2, 0)) if form.sinks is None else form.sinks.detach().numpy(),
        salience.detach().numpy() if salient else None,
        value.detach().numpy(),
        keep.numpy(),
        causal,
        window,
        window_sinks,
        causal,
    )
    shown = keep[:, None, :, None].numpy() if padding != "none" else np.ones(1)
    for dtype, route in itertools.product(TOLERANCE, ROUTES):
        distances = Relative(
            form.rows.to(dtype), form.positions, causal, None if form.sinks is None else form.sinks.to(dtype)
        )
        logits: Logits = distances
        if salient:
            logits = Sum([(None, distances), (None, KeyBias(salience.to(dtype), length))])
        if window is not None:
            logits = Windowed(logits, window, window_sinks, Positions(length, length))
        with only_route(route):
            output, _ = attend(logits, value.to(dtype), mask)
            with torch.no_grad():
                without_gradient, _ = attend(logits, value.to(dtype), mask)
        for actual in (output, without_gradient):
            difference = np.abs(actual.detach().double().numpy() * shown - expected * shown).max()
            assert difference < TOLERANCE[dtype], (route, dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_band_has_derivatives(causal: bool, window: int | None) -> None:
    torch.manual_seed(0)
    form, value, salience = case(70, 5, causal, 2, torch.float64)
    form.rows.data *= 0.3

    def run(*_: torch.Tensor) -> torch.Tensor:
        logits: Logits = Sum([(None, form), (None, KeyBias(salience, 70))])
        mask = AttentionMask(causal_offset=0 if causal else None)
        if window is not None:
            wrapped = Windowed(logits, window, 2, Positions(70, 70))
            mask = wrapped.restricted(mask, value.device)
        terms = Terms.of(logits, mask)
        assert band.serves(terms, value, mask, 0.0)
        return band.band_attention(terms, value, mask)[..., ::7, :2]

    assert form.sinks is not None
    assert torch.autograd.gradcheck(run, (form.rows, form.sinks, salience), fast_mode=True)
    assert math.isfinite(float(run().sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "window, padding", [(None, "none"), (None, "right"), (1, "left"), (5, "none"), (64, "right"), (100, "left")]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("route, compared", [("native", False), ("native", True), ("band", False), ("chunked", True)])
@pytest.mark.parametrize("length", [75, 540])
def test_gradients_equal_those_of_the_reference(dtype, window, padding, causal, route, compared, length) -> None:
    torch.manual_seed(0)
    form, value, salience = case(length, 7, causal, 3, dtype)
    assert form.sinks is not None
    weight = torch.rand(2, requires_grad=True)
    query, key = (torch.randn(3, 2, length, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    inputs = [form.rows, form.sinks, salience, value, *([query, key] if compared else [])]
    if dtype == torch.float32:
        inputs.append(weight)  # in bfloat16, rounding is as large as this sum over all pairs
    keep = visible_keys(padding, len(value), length)[:, None, None, :]
    mask = AttentionMask(keep if padding != "none" else None, causal_offset=0 if causal else None)
    shown = keep.squeeze(1).unsqueeze(-1) if padding != "none" else torch.ones(1)
    upstream = torch.randn_like(value) * shown.to(dtype)

    def output_and_gradients(computed: torch.dtype, need_weights: bool) -> list[torch.Tensor]:
        distances = Relative(form.rows.to(computed), form.positions, causal, form.sinks.to(computed))
        terms: list[tuple[torch.Tensor | None, Logits]] = [(weight, distances)]
        terms.append((None, KeyBias(salience.to(computed), length)))
        if compared:
            terms.append((None, LowRank(query.to(computed), key.to(computed))))
        logits: Logits = Sum(terms)
        if window is not None:
            logits = Windowed(logits, window, 2, Positions(length, length))
        output, _ = attend(logits, value.to(computed), mask, need_weights=need_weights)
        return [output * shown, *torch.autograd.grad(output, inputs, upstream.to(computed))]

    with only_route(route):
        by_kernels = output_and_gradients(dtype, need_weights=False)
    by_reference = output_and_gradients(torch.float32, need_weights=True)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    for actual, expected in zip(by_kernels, by_reference, strict=True):
        most = max(float(expected.detach().abs().max()), 0.1)
        assert torch.allclose(actual.float(), expected.float(), atol=most * tolerance)
