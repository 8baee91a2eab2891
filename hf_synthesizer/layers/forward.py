"""The forward pass that all layer classes share: values, cache, positions, logits, softmax and output projection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from ..attend import attend
from ..device.matmul import linear
from ..errors import UnsupportedModelError
from ..logits.forms import Logits
from ..logits.masks import AttentionMask
from ..logits.positions import Positions, exporting
from ..synthesizers import Synthesizer
from .caching import (
    KeptStep,
    Need,
    NewTokens,
    can_drop,
    drop,
    drop_first,
    dropped_tokens,
    extend,
    layer_that_drops,
    needs_of,
    split_states,
)
from .finding.projections import OUTPUT_DROPOUTS, ProjectionNames, dropout_probability, has_window
from .guard import Guard
from .refusals import require_known_arguments

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

BACKENDS = ("eager", "sdpa")


@dataclass(frozen=True)
class CachedTokens:
    """The tokens that a layer attends to: those of its cache, and the new ones.

    Attributes:
        past_key_values: the cache.
        needs: what the groups of heads need of a cache; empty if there is none.
        before: how many tokens came before.
        length: the number of all tokens.
        dropped: how many tokens a sliding window of the stock model has dropped.
        key_states: of all tokens, if the cache has them.
        value: (B, G, Lk, d_v) of all tokens, if the cache has them.
        step: what the cache keeps, if it has dropped tokens that the heads of this layer don't need.
    """

    past_key_values: Any
    needs: list[Need]
    before: int | torch.Tensor
    length: int
    dropped: int = 0
    key_states: torch.Tensor | None = None
    value: torch.Tensor | None = None
    step: KeptStep | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
        value = self.step.kept.value_parts[0].tensor if self.value is None and self.step is not None else self.value
        assert value is not None
        return value.dtype


class SelfAttentionForward(nn.Module):
    """The steps of a forward pass. A layer class calls `attend_to_itself`, or the steps one by one."""

    counts_from_padding: ClassVar[bool] = False
    """Whether positions start at a row's first visible key if the caller passes no `position_ids`."""
    projection_names: ProjectionNames
    config: Any
    layer_idx: Any = None
    synthesizer: Synthesizer

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """hidden_size, num_heads and head_dim of the stock module."""
        return self.__dict__["_dimensions"]

    @property
    def dropout_probability(self) -> float:
        """The probability with which the stock module drops a weight in training."""
        return dropout_probability(self)

    @property
    def dropout_in_use(self) -> float:
        """The probability with which a weight is dropped now: 0 outside training."""
        return self.dropout_probability if self.training else 0.0

    @property
    def backend(self) -> str:
        """The attention backend that the model's config names."""
        return self.config._attn_implementation

    @property
    def guard_name(self) -> str:
        """The projection under whose name the guard is stored, so that no stock class accepts the checkpoint."""
        return self.projection_names.fused or self.projection_names.query

    def attend_to_itself(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        position_bias: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        is_causal: bool | None = None,
        need_weights: bool | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The whole forward pass of most layer classes.

        Args:
            hidden_states: (B, L, d).
            attention_mask: (B, 1 or H, Lq, Lk), bool or additive, or None.
            past_key_values: the cache of a decoder.
            position_bias: (1 or B, H, Lq, Lk), added to the logits.
            position_ids: (B or 1, L), the positions of the tokens.
            is_causal: whether a query sees only the past if there is no mask; None for what the module says.
            need_weights: whether to return the weights; None for "under eager".
            **arguments: everything else that the caller passed.

        Raises:
            UnsupportedModelError: for an argument that changes attention and that layer classes do not know.
        """
        self.require_backend(attention_mask, **arguments)
        length, wanted = hidden_states.shape[1], self.backend == "eager" if need_weights is None else need_weights
        known = has_position_ids(position_ids, length)
        merges = position_bias is None and not wanted
        tokens = self.update_cache(hidden_states, past_key_values, known, merges)
        positions = self.positions(position_ids, attention_mask, length, tokens.length, tokens.before, tokens.dropped)
        output, weights = self.attend_to_tokens(
            tokens, hidden_states, attention_mask, positions, position_bias, is_causal, wanted
        )
        return self.project_output(output, hidden_states), weights

    def project_values(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The values (B, G, L, d_v) of G ≤ H groups of heads."""
        batch, length, _ = hidden_states.shape
        projected = linear(cast(nn.Module, self._modules[self.projection_names.value]), hidden_states)
        return projected.view(batch, length, -1, self.dimensions[2]).transpose(1, 2)

    def project_output(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output projection and its dropout, if the stock module has them: (B, L, H·d_v)."""
        if self.projection_names.output is not None:
            output = linear(cast(nn.Module, self._modules[self.projection_names.output]), output)
        for name in OUTPUT_DROPOUTS:
            if name in self._modules:
                output = cast(nn.Module, self._modules[name])(output)
        return output

    def update_cache(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None,
        positions_known: bool = False,
        merges: bool = False,
    ) -> CachedTokens:
        """Compute values and key states of the new tokens, and add them to the cache.

        `merges` says whether the cache may merge tokens: if no weights are wanted, and no bias is added to the logits.
        """
        value, key_states = self.project_values(hidden_states), self.synthesizer.project_keys(hidden_states)
        needs = [] if past_key_values is None else needs_of(self.synthesizer, merges and not has_window(self))
        layer = layer_that_drops(past_key_values, self.layer_idx)
        if layer is not None:
            new = NewTokens(value, None, split_states(self.synthesizer, key_states))
            step = KeptStep(past_key_values, self.layer_idx, layer, needs, new)
            return CachedTokens(past_key_values, needs, step.before, step.total, step=step)
        key_states, value, before = extend(past_key_values, self.layer_idx, key_states, value, positions_known)
        dropped = dropped_tokens(past_key_values, self.layer_idx, value.shape[-2])
        return CachedTokens(past_key_values, needs, before, value.shape[-2], dropped, key_states, value)

    def attend_to_tokens(
        self,
        tokens: CachedTokens,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        positions: Positions,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        need_weights: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, Lq, H·d_v) and weights (`attend`). Then the cache drops what no later query needs."""
        if tokens.step is None:
            assert tokens.value is not None
            logits = self.synthesizer(hidden_states, tokens.key_states, positions)
            output, weights = self.attend(
                logits, tokens.value, mask, positions, position_bias, is_causal, need_weights=need_weights
            )
        else:
            whole = self.whole_mask(mask, positions, position_bias, is_causal)
            wanted = self.backend == "eager" if need_weights is None else need_weights
            output, weights = tokens.step.attend(
                hidden_states, positions, whole, self.dropout_in_use, wanted, self.dimensions[1]
            )
            output = output.transpose(1, 2).flatten(2)
        if any(need.near is not None for need in tokens.needs):
            self.drop_tokens(tokens, hidden_states, mask, positions, position_bias, is_causal)
        return output, weights

    def drop_tokens(
        self,
        tokens: CachedTokens,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        positions: Positions,
        position_bias: torch.Tensor | None,
        is_causal: bool | None,
        **compared: Any,
    ) -> None:
        """Let the cache drop tokens that no later query needs, if they are many by now."""
        whole = partial(self.whole_mask, mask, positions, position_bias, is_causal)
        step, length = tokens.step, hidden_states.shape[1]
        if step is not None:
            drop(step.layer, tokens.needs, self.dimensions[1], length, hidden_states, positions, whole)
        elif not tokens.dropped and can_drop(tokens.past_key_values, self.layer_idx):
            assert tokens.value is not None
            key = compared.pop("key", None)
            kept = NewTokens(tokens.value, key, split_states(self.synthesizer, tokens.key_states))
            place = (tokens.past_key_values, self.layer_idx, tokens.needs, self.dimensions[1], length)
            drop_first(*place, hidden_states, kept, positions, whole, **compared)

    def positions(
        self,
        position_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        length: int,
        key_length: int,
        start: int | torch.Tensor,
        dropped: int = 0,
    ) -> Positions:
        """The positions of queries and keys: from `position_ids`, else from padding on the left if the model counts from there."""
        if has_position_ids(position_ids, length):
            windowed = has_window(self)
            return Positions.from_position_ids(position_ids, length, key_length, start, mask, dropped, windowed)
        if self.counts_from_padding:
            return Positions.from_left_padding(mask, length, key_length, start)
        return Positions.from_position_ids(None, length, key_length, start)

    def require_backend(self, mask: Any, **arguments: Any) -> None:
        """Raise `UnsupportedModelError` for an argument that changes attention, or a backend whose masks cannot be read.

        `arguments` are those that the layer class does not handle itself.
        """
        require_known_arguments(arguments)
        backend = self.backend
        if backend not in BACKENDS or not (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 4)):
            passed = f"a mask of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedModelError(
                f"Synthesized attention runs under the backends {' and '.join(BACKENDS)}; this model asks for "
                f"{backend!r} and passes {passed} as mask. Call model.set_attn_implementation('sdpa'), or load the "
                f"model with attn_implementation='sdpa'."
            )

    def attend(
        self,
        logits: Logits,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        positions: Positions,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        dropout: float | None = None,
        need_weights: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, mask, softmax and values: output (B, Lq, H·d_v), and weights (B, H, Lq, Lk) under eager.

        Args:
            logits: of the synthesizer.
            value: (B, H, Lk, d_v), or (B, G, Lk, d_v) if groups of heads share values; cached ones included.
            mask: as Transformers' eager and sdpa backends pass it.
            positions: of queries and keys.
            position_bias: (1 or B, H, Lq, Lk), added to the logits.
            is_causal: whether a query sees only the past if there is no mask; None for what the module says.
            dropout: the probability with which a weight is dropped; None for the module's own in training, else 0.
            need_weights: whether to return the weights; None for "under eager".
        """
        if dropout is None:
            dropout = self.dropout_in_use
        if value.shape[1] != self.dimensions[1]:
            value = value.repeat_interleave(self.dimensions[1] // value.shape[1], dim=1)
        output, weights = attend(
            logits,
            value,
            self.whole_mask(mask, positions, position_bias, is_causal),
            dropout=dropout,
            need_weights=self.backend == "eager" if need_weights is None else need_weights,
        )
        output = output.transpose(1, 2)  # (B, Lq, H, d_v)
        if exporting():
            # The kernel on the target machine may lay out its output in another way.
            output = output.clone(memory_format=torch.contiguous_format)
        return output.flatten(2), weights

    def whole_mask(
        self,
        mask: torch.Tensor | None,
        positions: Positions,
        position_bias: torch.Tensor | None,
        is_causal: bool | None,
    ) -> AttentionMask:
        """The mask of all tokens, from the mask of Transformers and what the module says of itself."""
        if is_causal is None:
            # Transformers' own functions assume the same of a module without the attribute.
            is_causal = getattr(self, "is_causal", self.backend == "sdpa")
        guard = self._modules[self.guard_name]
        if isinstance(guard, Guard):  # PEFT may have wrapped it
            guard.require(f"layer {self.layer_idx} of this model")
        # Under sdpa Transformers passes no mask for a plain triangle: the module itself has to be causal. Under
        # eager no mask means that every query sees every key, even if the module is causal.
        causal = is_causal and self.backend == "sdpa" and mask is None and not positions.at_the_end
        whole = AttentionMask.from_tensor(mask, causal_offset=positions.start if causal else None)
        return whole.with_bias(position_bias)


def has_position_ids(position_ids: torch.Tensor | None, length: int) -> bool:
    """Whether `position_ids` give one number for each of `length` tokens."""
    return position_ids is not None and position_ids.dim() == 2 and position_ids.shape[-1] == length
