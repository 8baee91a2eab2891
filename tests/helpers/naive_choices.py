"""Which keys a query chooses, written out as loops from the papers' definitions and not from the code."""

from __future__ import annotations

import math

import numpy as np

BUCKET_SIZE, NUM_HASHES, U = 32, 4, 0.75


def chosen(
    variant: str,
    state: dict[str, np.ndarray],
    vectors: np.ndarray,
    keep: list[bool],
    causal: bool = False,
    *,
    max_length: int = 0,
    stride: int | None = None,
    bucket_size: int = BUCKET_SIZE,
    qnf: bool = False,
) -> np.ndarray:
    """Which pairs (i, j) meet: bool (H, L, L), for the shared queries and keys (H, L, d) of one row."""
    heads, length, _ = vectors.shape
    tokens = [t for t in range(length) if keep[t]]
    meets = np.zeros((heads, length, length), dtype=bool)
    for h in range(heads):
        if variant.startswith("sparse"):
            found = pattern(variant, h < math.ceil(heads / 2), tokens, causal, stride, max_length)
        elif variant == "routing":
            found = cluster(vectors[h], tokens, state["directions"])
        else:
            found = hashing(variant, vectors[h], tokens, state["directions"], bucket_size, qnf)
        for i, keys in found.items():
            for j in keys:
                meets[h, i, j] = not causal or j <= i
    return meets


def pattern(
    variant: str, near: bool, tokens: list[int], causal: bool, stride: int | None, max_length: int
) -> dict[int, list[int]]:
    """The keys of each token by position, counted from the first token."""
    if not tokens:
        return {}
    first = tokens[0]
    l = stride or math.isqrt(max_length if causal else tokens[-1] - first + 1)  # noqa: E741
    found: dict[int, list[int]] = {i: [] for i in tokens}
    for i in tokens:
        for j in tokens:
            p, q = i - first, j - first
            if variant == "sparse_strided":
                meet = abs(p - q) <= l if near else (p - q) % l == 0
            else:
                meet = p // l == q // l if near else q % l == l - 1
            if meet:
                found[i].append(j)
    return found


def transformed_key(variant: str, k: np.ndarray, m: float) -> np.ndarray:
    """P(k), for the largest norm m of a key."""
    if variant == "lsh_simple":
        return np.append(k / m, math.sqrt(max(0.0, 1 - (k / m) @ (k / m))))
    if variant == "alsh_simple":
        return np.append(k / m, [math.sqrt(max(0.0, 1 - (k / m) @ (k / m))), 0.0])
    if variant == "alsh_xbox":
        return np.append(k, math.sqrt(max(0.0, m * m - k @ k)))
    y = U * k / m
    return np.append(y, [0.5 - y @ y, 0.5 - (y @ y) ** 2])


def transformed_query(variant: str, q: np.ndarray, m: float, qnf: bool) -> np.ndarray:
    """Q(q)."""
    if variant == "lsh_simple":
        return np.append(q / np.linalg.norm(q), 0.0)
    if variant == "alsh_simple":
        return np.append(q / m, [0.0, math.sqrt(max(0.0, 1 - (q / m) @ (q / m)))])
    if variant == "alsh_xbox":
        return np.append(m * q / np.linalg.norm(q) if qnf else q, 0.0)
    return np.append(q / np.linalg.norm(q) if qnf else U * q / m, [0.0, 0.0])


def hashing(
    variant: str, x: np.ndarray, tokens: list[int], directions: np.ndarray, bucket_size: int, qnf: bool
) -> dict[int, list[int]]:
    """The best keys among those that the hashes find."""
    if not tokens:
        return {}
    m = max(np.linalg.norm(x[t]) for t in tokens)
    stored = {t: transformed_key(variant, x[t], m) for t in tokens}
    asked = {t: transformed_query(variant, x[t], m, qnf) for t in tokens}
    candidates: dict[int, set[int]] = {t: set() for t in tokens}
    for frame in directions:
        buckets = [sorted(tokens, key=lambda t: -(a @ stored[t]))[:bucket_size] for a in (*frame, *(-frame))]
        means = [sum(stored[t] for t in bucket) / len(bucket) for bucket in buckets]
        for i in tokens:
            nearest = min(range(len(buckets)), key=lambda c: np.linalg.norm(asked[i] - means[c]))
            candidates[i] |= set(buckets[nearest])
    return {i: sorted(candidates[i], key=lambda j: -(x[i] @ x[j]))[:bucket_size] for i in tokens}


def cluster(x: np.ndarray, tokens: list[int], directions: np.ndarray) -> dict[int, list[int]]:
    """The tokens of each token's own cluster."""
    count = math.isqrt(len(tokens))
    unit = {t: x[t] / np.linalg.norm(x[t]) for t in tokens}
    label = {t: max(range(count), key=lambda c: directions[c] @ unit[t]) for t in tokens}
    for _ in range(5):
        centroids = {}
        for c in set(label.values()):
            total = sum(unit[t] for t in tokens if label[t] == c)
            centroids[c] = total / np.linalg.norm(total)
        label = {t: max(centroids, key=lambda c: centroids[c] @ unit[t]) for t in tokens}
    return {i: [j for j in tokens if label[j] == label[i]] for i in tokens}
