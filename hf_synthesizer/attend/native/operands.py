"""The inputs of the native kernels, and the structures that C++ reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import AttentionInputError
from ...logits.masks import AttentionMask
from ..kernel_terms import Counts, KernelTerms, Tensors
from ..operand_checks import broadcast_strides, require_factors, require_operand
from ..randomness import draw_seed
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
    """The inputs of the kernels. Values and terms are separate arguments, so that autograd sees them."""

    query_length: int
    counts: Counts
    """`KernelTerms.counts`."""
    mask: AttentionMask
    ends: torch.Tensor | None
    """(B,) int64 on the host: the index of the last visible key + 1. Later keys are cut off."""
    keep: torch.Tensor | None
    """What is left to mask."""
    dropout: float
    seed: int
    bfloat16_products: bool
    shared: bool = False
    """Whether all rows of the batch have the same weights, before `factor`."""
    factor: torch.Tensor | None = None
    """(1 or B, 1 or H, 1, Lk): multiplies each key's weights before they are normalised."""
    near: int = 0
    """If not 0, a block of queries sees the blocks of keys that `near_blocks` names for this window alone."""

    @classmethod
    def of(
        cls, terms: Terms, value: torch.Tensor, mask: AttentionMask, dropout: float, bfloat16: bool
    ) -> tuple[KernelInputs, list[torch.Tensor | None]]:
        """The inputs, and the tensors (values, then terms) in the kernels' layout."""
        kernel_terms = KernelTerms.of(terms, value)
        kernel_terms = kernel_terms._replace(
            added=[term._replace(weight=float32_weight(term.weight)) for term in kernel_terms.added]
        )
        tensors = [kernel_layout(tensor) for tensor in (value, *kernel_terms.tensors())]
        ends, keep = mask.row_ends(len(value))
        inputs = cls(
            query_length=terms.query_length,
            counts=kernel_terms.counts,
            mask=AttentionMask(mask.keep, None, mask.causal_offset, reach=mask.reach),
            ends=None if ends is None else torch.tensor(ends, device=PROCESSOR),
            keep=kernel_layout(keep),
            dropout=dropout,
            seed=draw_seed(dropout, value),
            bfloat16_products=bfloat16 and value.dtype == torch.bfloat16,
        )
        return inputs, tensors

    def arguments(self, tensors: Tensors, *, training: bool = False) -> KernelArguments:
        """The structure that C++ reads. It points into the tensors, which must outlive it.

        Raises:
            AttentionInputError: if the tensors' shapes, dtypes or devices disagree.
        """
        value, terms = tensors[0], KernelTerms.from_tensors(tensors[1:], self.counts)
        assert value is not None
        batch, heads, keys, width = value.shape
        queries, rank = self.query_length, 0 if terms.query is None else terms.query.shape[-1]
        causal_offset = self.mask.causal_offset
        logits = (batch, heads, queries, keys)
        arguments = KernelArguments(
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            width=width,
            rank=rank,
            value=tensor_argument("values", value, value.shape),
            query=tensor_argument("queries", terms.query, (batch, heads, queries, rank), broadcast=3),
            key=tensor_argument("keys", terms.key, (batch, heads, keys, rank), broadcast=2),
            keep=tensor_argument("a mask", self.keep, logits, (torch.bool,), broadcast=3),
            outers=len(terms.outer_products),
            addeds=len(terms.added),
            causal_offset=max(keys, queries) if causal_offset is None else int(causal_offset),
            ends=checked_pointer("ends of rows", self.ends, (batch,), torch.int64),
            dropout=self.dropout,
            seed=self.seed,
            threads=torch.get_num_threads(),
            bfloat16_products=self.bfloat16_products,
            start=self.counts.start,
            window=self.near,
            by_tiles=self.near > 0,
        )
        reach = self.mask.reach
        tokens = None if reach is None else -reach.tokens[:, 0].expand(batch).contiguous()
        if reach is not None:
            arguments.window, arguments.sinks, arguments.start = reach.window, reach.sinks, int(reach.positions.start)
            arguments.tokens = checked_pointer("first tokens of rows", tokens, (batch,), torch.int64)
            arguments.kept = tokens  # the structure points into it
        for number, (inner, outer) in enumerate(terms.outer_products):
            factors = arguments.outer[number]
            factors.a, factors.b = inner.shape[-1], outer.shape[-1]
            require_factors(factors.a, factors.b, keys)
            factors.inner = tensor_argument("inner factors", inner, (batch, heads, queries, factors.a), broadcast=3)
            factors.outer = tensor_argument("outer factors", outer, (batch, heads, queries, factors.b), broadcast=3)
        for number, (tensor, weight, zero) in enumerate(terms.added):
            if zero is not None:
                arguments.added[number].columns, arguments.added[number].zero = tensor.shape[-1], zero
            shape = (*logits[:3], keys if zero is None else tensor.shape[-1])
            arguments.added[number].tensor = tensor_argument("logits", tensor, shape, broadcast=3)
            arguments.added[number].weight = checked_pointer("weights of heads", weight, (heads,))
        laid_out = keys * (2 if training else 1) * (arguments.rank + width) * batch
        shared = any(tensor.shape[2] > 1 and len(tensor) == 1 for tensor, *_ in terms.added)
        arguments.together = batch if shared and (training or laid_out <= TOGETHER) else 1
        if self.shared:
            arguments.shared, arguments.together = 1, max(1, min(batch, COLUMNS // width))
            arguments.factor = tensor_argument("factors of keys", self.factor, (batch, heads, 1, keys), broadcast=3)
        arguments.parts = self.query_parts(arguments)
        return arguments

    def plain_mask(self, key_length: int) -> AttentionMask:
        """The mask for operations of PyTorch."""
        if not self.near:
            return self.mask
        query, key = torch.arange(self.query_length, device=PROCESSOR), torch.arange(key_length, device=PROCESSOR)
        first, last = near_blocks(query[:, None] // QUERIES, self.near)
        near = ((key // QUERIES >= first) & (key // QUERIES < last))[None, None]
        return AttentionMask(near if self.mask.keep is None else self.mask.keep & near, None, self.mask.causal_offset)

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


def float32_weight(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.float().contiguous()


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
    return TensorArgument(tensor.data_ptr(), *broadcast_strides(tensor), KINDS[tensor.dtype])


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
