"""The inputs of the native kernels: tensors in a fixed order for autograd, and the structures that C++ reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...errors import AttentionInputError
from ...logits.masks import AttentionMask
from ...logits.reach import Reach
from ..operand_checks import require_operand
from ..terms import Terms
from .blocks import QUERIES, near_blocks

MOST_OUTERS, MOST_ADDED = 2, 8
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.bool: 2}
PROCESSOR = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 512  # of values, over rows of the batch that share their weights
TOGETHER = 1 << 23  # most numbers that a thread copies so that all rows of the batch share one read of a table


class TensorArgument(ctypes.Structure):
    """An input tensor; see source/arguments.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row", "kind"))]


class OuterProduct(ctypes.Structure):
    _fields_ = [
        ("inner", TensorArgument),
        ("outer", TensorArgument),
        ("a", ctypes.c_int64),
        ("b", ctypes.c_int64),
        ("inner_gradient", ctypes.c_void_p),
        ("outer_gradient", ctypes.c_void_p),
    ]


class AddedTerm(ctypes.Structure):
    _fields_ = [
        ("tensor", TensorArgument),
        ("columns", ctypes.c_int64),
        ("zero", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        *((f"gradient_{name}", ctypes.c_int64) for name in ("kind", "part", "batch", "head", "row", "zeroed")),
        ("weight_gradient", ctypes.c_void_p),
    ]


class KernelArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width", "rank")),
        *((name, TensorArgument) for name in ("value", "query", "key", "keep")),
        ("outers", ctypes.c_int64),
        ("addeds", ctypes.c_int64),
        ("outer", OuterProduct * MOST_OUTERS),
        ("added", AddedTerm * MOST_ADDED),
        ("causal_offset", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("window", "sinks", "start", "by_tiles")),
        ("tokens", ctypes.c_void_p),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("threads", "parts", "together", "bfloat16_products", "shared")),
        ("factor", TensorArgument),
        ("output", ctypes.c_void_p),
        ("normaliser", ctypes.c_void_p),
        ("output_gradient", TensorArgument),
        ("forward_output", TensorArgument),
        ("normaliser_gradient", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("value_gradient", "query_gradient", "key_gradient")),
    ]


@dataclass(frozen=True)
class KernelInputs:
    """The inputs of the kernels, except for tensors with gradients: these are separate arguments, so that autograd sees them.

    The tensors' order: value (B, H, Lk, d_v), query (B, H, Lq, r) and key (1 or B, H, Lk, r) or None, inner and outer
    of each outer product, then a tensor (1 or B, 1 or H, 1 or Lq, Lk) and a weight (H,) or None of each other added term. The
    last of these are logits by distance, (1 or B, 1 or H, 1 or Lq, columns).
    """

    query_length: int
    outers: int
    keep: torch.Tensor | None
    causal_offset: int | None
    ends: torch.Tensor | None
    """(B,) int64 on the host: the index of the last visible key + 1."""
    dropout: float
    seed: int
    bfloat16_products: bool
    shared: bool = False
    """Whether all rows of the batch have the same weights, before `factor`."""
    factor: torch.Tensor | None = None
    """(1 or B, 1 or H, 1, Lk): multiplies each key's weights before they are normalised."""
    zero_columns: tuple[int, ...] = ()
    """Of each term by distance, the column of distance 0."""
    window: int = 0
    """A query sees the keys less than `window` places away, and the first `sinks` tokens; 0 for no limit."""
    sinks: int = 0
    start: int = 0
    """Query i is at index `start` + i of the keys."""
    by_tiles: bool = False
    """Whether all queries of a tile see what one of them sees: the key blocks from `near_blocks` on."""
    tokens: torch.Tensor | None = None
    """(B,) int64 on the host: the index of a row's first token."""

    @classmethod
    def of(
        cls, terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float, bfloat16: bool
    ) -> tuple[KernelInputs, list[torch.Tensor | None]]:
        """The inputs, and their tensors in order, in the kernels' layout."""
        query, key = terms.joined_with_factors(value)
        tensors: list[torch.Tensor | None] = [kernel_layout(value), kernel_layout(query), kernel_layout(key)]
        for inner, outer, _ in terms.tiled:
            tensors += [kernel_layout(inner), kernel_layout(outer)]
        for tensor, weight in added_terms(terms):
            tensors += [kernel_layout(tensor), None if weight is None else weight.float().contiguous()]
        for term in terms.relative:
            tensors += [kernel_layout(term.rows), None if term.weight is None else term.weight.float().contiguous()]
        ends, keep = None, mask.keep
        if keep is not None and keep.shape[1] == keep.shape[2] == 1:
            extents = mask.extents()
            rows = range(len(value))
            ends = torch.tensor([extents.of(row)[1] for row in rows], device=PROCESSOR)
            keep = keep if any(extents.hides_one(row) for row in rows) else None
        inputs = cls(
            query_length=terms.query_length,
            outers=len(terms.tiled),
            keep=kernel_layout(keep),
            causal_offset=cast("int | None", mask.causal_offset),
            ends=ends,
            dropout=dropout,
            seed=int(torch.randint(1 << 62, (), device=PROCESSOR)) if dropout else 0,
            bfloat16_products=bfloat16 and value.dtype == torch.bfloat16,
            zero_columns=tuple(term.form.max_distance for term in terms.relative),
            **place_of_queries(terms, mask.reach, len(value)),
        )
        return inputs, tensors

    def outer_terms(self, tensors: Sequence[Any]) -> list[tuple[int, Any, Any]]:
        """(index among the tensors, inner, outer) of each outer product."""
        return [(n, tensors[n], tensors[n + 1]) for n in range(3, 3 + 2 * self.outers, 2)]

    def added_terms(self, tensors: Sequence[Any]) -> list[tuple[int, Any, Any]]:
        """(index among the tensors, tensor, weight) of each other added term."""
        return [(n, tensors[n], tensors[n + 1]) for n in range(3 + 2 * self.outers, len(tensors), 2)]

    def within_reach(self, key_length: int) -> torch.Tensor:
        """True where the window lets a query see a key, (B or 1, 1, Lq, Lk)."""
        key = torch.arange(key_length, device=PROCESSOR)
        query = torch.arange(self.query_length, device=PROCESSOR)[:, None] + self.start
        if self.by_tiles:
            first, last = near_blocks(query // QUERIES, self.window)
            return ((key // QUERIES >= first) & (key // QUERIES < last))[None, None]
        number = key - (torch.zeros(1, dtype=torch.int64) if self.tokens is None else self.tokens)[:, None]
        first = (number >= 0) & (number < self.sinks)
        return (((key - query).abs() < self.window) | first[:, None, :]).unsqueeze(1)

    def for_each_key(self, number: int, tensors: Sequence[Any], key_length: int) -> torch.Tensor:
        """Logits by distance as a tensor (1 or B, 1 or H, Lq, Lk)."""
        rows, zero = tensors[number], self.zero_columns[(number - len(tensors)) // 2]
        query = torch.arange(self.query_length, device=PROCESSOR)[:, None] + self.start
        columns = (torch.arange(key_length, device=PROCESSOR) - query + zero).clamp(0, rows.shape[-1] - 1)
        return rows.expand(-1, -1, self.query_length, -1).gather(-1, columns.expand(*rows.shape[:2], -1, -1))

    def is_relative(self, number: int, tensors: Sequence[Any]) -> bool:
        """Whether the tensor of this number holds logits by distance."""
        return number >= len(tensors) - 2 * len(self.zero_columns)

    def arguments(self, tensors: Sequence[torch.Tensor | None], *, training: bool = False) -> KernelArguments:
        """The structure that C++ reads. It points into the tensors, which must outlive it.

        Raises:
            AttentionInputError: if the tensors' shapes, dtypes or devices disagree.
        """
        value, query, key = tensors[:3]
        assert value is not None
        batch, heads, keys, width = value.shape
        queries, rank = self.query_length, 0 if query is None else query.shape[-1]
        logits = (batch, heads, queries, keys)
        arguments = KernelArguments(
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            width=width,
            rank=rank,
            value=tensor_argument("values", value, value.shape),
            query=tensor_argument("queries", query, (batch, heads, queries, rank), broadcast=3),
            key=tensor_argument("keys", key, (batch, heads, keys, rank), broadcast=2),
            keep=tensor_argument("a mask", self.keep, logits, (torch.bool,), broadcast=3),
            outers=self.outers,
            causal_offset=max(keys, queries) if self.causal_offset is None else self.causal_offset,
            ends=checked_pointer("ends of rows", self.ends, (batch,), torch.int64),
            dropout=self.dropout,
            seed=self.seed,
            threads=torch.get_num_threads(),
            bfloat16_products=self.bfloat16_products,
            window=self.window,
            sinks=self.sinks,
            start=self.start,
            by_tiles=self.by_tiles,
            tokens=checked_pointer("first tokens of rows", self.tokens, (batch,), torch.int64),
        )
        for number, (_, inner, outer) in enumerate(self.outer_terms(tensors)):
            term = arguments.outer[number]
            term.a, term.b = inner.shape[-1], outer.shape[-1]
            if term.a * term.b < keys:
                raise AttentionInputError(
                    f"Attention was given an outer product of {term.a} and {term.b} numbers for {keys} keys. Use factors "
                    f"whose product is at least {keys}."
                )
            term.inner = tensor_argument("inner factors", inner, (batch, heads, queries, term.a), broadcast=3)
            term.outer = tensor_argument("outer factors", outer, (batch, heads, queries, term.b), broadcast=3)
        added = self.added_terms(tensors)
        arguments.addeds = len(added)
        for number, (_, tensor, weight) in enumerate(added):
            if self.is_relative(added[number][0], tensors):
                by_distance = (batch, heads, queries, tensor.shape[-1])
                arguments.added[number].tensor = tensor_argument(
                    "logits by distance", tensor, by_distance, broadcast=3
                )
                arguments.added[number].columns = tensor.shape[-1]
                arguments.added[number].zero = self.zero_columns[number - len(added)]
            else:
                arguments.added[number].tensor = tensor_argument("logits", tensor, logits, broadcast=3)
            arguments.added[number].weight = checked_pointer("weights of heads", weight, (heads,))
        laid_out = keys * (2 if training else 1) * (arguments.rank + width) * batch
        shared = any(tensor.shape[2] > 1 and len(tensor) == 1 for _, tensor, _ in added)
        arguments.together = batch if shared and (training or laid_out <= TOGETHER) else 1
        if self.shared:
            arguments.shared, arguments.together = 1, max(1, min(batch, COLUMNS // width))
            arguments.factor = tensor_argument("factors of keys", self.factor, (batch, heads, 1, keys), broadcast=3)
        arguments.parts = self.query_parts(arguments)
        return arguments

    def query_parts(self, arguments: KernelArguments) -> int:
        """The number of parts that queries are divided into, so that all threads have equal work."""
        items = arguments.heads * -(-arguments.batch // arguments.together)
        tiles = -(-arguments.queries // QUERIES)
        if arguments.threads == 1 or items >= 8 * arguments.threads:
            return 1
        for parts in range(1, tiles + 1):
            rounds = -(-items * parts // arguments.threads)
            if items * parts / (rounds * arguments.threads) > 0.9:
                return parts
        return tiles


def added_terms(terms: Terms) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(tensor, weight or None) of each term that is added to the logits: key bias, explicit terms, static tables."""
    added: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    if terms.key_bias is not None:
        added.append((terms.key_bias, None))
    added += [(explicit, None) for explicit in terms.explicit]
    added += [(term.table.unsqueeze(0), term.weight) for term in terms.static if term.keys is None]
    return added


def place_of_queries(terms: Terms, reach: Reach | None, batch: int) -> dict[str, Any]:
    """The index of the first query, and the window."""
    if reach is None:
        return {"start": terms.relative[0].start} if terms.relative else {}
    first = -reach.tokens[:, 0].expand(batch).contiguous()
    return {"window": reach.window, "sinks": reach.sinks, "start": reach.positions.start, "tokens": first}


def kernel_layout(tensor: Any) -> Any:
    """The tensor if its columns are contiguous and no negation is pending, else a copy."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def tensor_argument(
    name: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype] = DTYPES,
    broadcast: int = 0,
) -> TensorArgument:
    """A tensor of four dimensions for C++. Dimensions of size 1 get stride 0, and so serve all rows, heads or queries.

    Only this function and `checked_pointer` create pointers for the kernels. Both check the tensor first.
    """
    if tensor is None:
        return TensorArgument()
    require_operand(name, tensor, shape, PROCESSOR, dtypes, broadcast)
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)]
    return TensorArgument(tensor.data_ptr(), *strides, KINDS[tensor.dtype])


def checked_pointer(
    name: str, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> int | None:
    """The address of a contiguous tensor, after checks."""
    if tensor is None:
        return None
    require_operand(name, tensor, shape, PROCESSOR, (dtype,))
    if not tensor.is_contiguous():
        raise AttentionInputError(f"Attention was given {name} that is not contiguous. Call contiguous().")
    return tensor.data_ptr()


def allocate(*sizes: int, dtype: torch.dtype = torch.float32, zeros: bool = False) -> torch.Tensor:
    """Memory on the host for the kernels to write, independent of PyTorch's default device and dtype."""
    return (torch.zeros if zeros else torch.empty)(sizes, dtype=dtype, device=PROCESSOR)
