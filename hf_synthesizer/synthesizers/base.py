"""The base class of all synthesizers: a module that maps hidden states to lazy logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..logits.forms import Logits
from ..logits.positions import Positions
from ..logits.reach import Windowed
from ..upstream.transformers_names import LOADED
from .config import SynthesizerConfig
from .options import Option
from .statistics import Fit, Statistic


class Synthesizer(nn.Module):
    """The logits S of `softmax(S + mask) · V`, for H heads of width d_h and up to N = `max_length` positions.

    A subclass is registered with `@register_variant("name")`, and defines `__init__` with the signature below,
    `synthesize` and `start_at_zero`. If its logits depend on the keys' tokens, it also defines `key_width` and
    `project_keys`. If its parameters can be computed from a teacher, it names a `statistic` and defines `fit`. The
    second paragraph of its docstring is for users.

    Hooks for offloading and sharding load a module's parameters when the module is called, and free them afterwards. So
    a synthesizer must call the synthesizers that it contains. `project_keys` runs outside `forward`, so it may only use
    parameters of submodules that it calls.

    Args:
        hidden_size: the width d of the hidden states.
        num_heads: the number H of heads.
        max_length: the number N of positions; 0 if there is no longest sequence.
        config: the options; the registered variant's defaults if None.
        head_dim: the width d_h of a head, `hidden_size // num_heads` if None.
    """

    variant: ClassVar[str]
    """The registered name."""
    formula: ClassVar[str]
    """The formula of the logits S[h, i, j], as the README prints it."""
    parameter_formula: ClassVar[str]
    """The number of trained weights of a layer's logits, without biases."""
    options: ClassVar[Mapping[str, Option]] = {}
    """The options of the variant. `self.config.rank` is the value of the option `rank`."""
    statistic: ClassVar[type[Statistic] | None] = None
    """What `fit` needs to know of the teacher. None if the variant has no closed form."""
    constants: ClassVar[tuple[float, ...]] = (1.0,)
    """The candidates of `Fit.constants`."""
    fitted_rate: ClassVar[float] = 1.0
    """The factor of the learning rate after `fit`, for a layer that would lose its closed form at a higher rate."""
    limits_reach: bool = True
    """Whether the option `window` applies here. A mixture applies it once, for all its parts."""
    is_static: ClassVar[bool] = False
    """Whether S does not depend on the input."""
    key_side: ClassVar[bool] = False
    """Whether S depends on the key alone, and is the same for all queries. Such a part has weight 1 in a mixture."""
    chooses_keys: ClassVar[bool] = False
    """Whether a query attends to a subset of the keys. Such a variant cannot be part of a mixture."""
    whole_sequence: ClassVar[bool] = False
    """Whether a query's logits depend on later tokens. Such a variant cannot serve a decoder."""
    has_any_length: ClassVar[bool] = False
    """Whether S is defined for any length: without `max_length` there is no longest sequence."""
    is_stock: ClassVar[bool] = False
    """Whether S is the logits of the pretrained stock layer."""
    stock_projections: ClassVar[tuple[str, str] | None] = None
    """The names of the modules that start as the stock layer's query and key projections."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_length: int,
        config: SynthesizerConfig | None = None,
        *,
        head_dim: int | None = None,
    ):
        super().__init__()
        self.config = config if config is not None else SynthesizerConfig(self.variant)
        self.causal = False
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.max_length = max_length
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim

    @classmethod
    def documentation(cls) -> str:
        """What users read of the variant: the second paragraph of its docstring, as one line."""
        _, _, rest = (cls.__doc__ or "").partition("\n\n")
        return " ".join(rest.partition("\n\n")[0].split())

    @property
    def table_heads(self) -> int:
        """The number of heads in the tables: 1 if all heads share them."""
        return 1 if self.config.options.get("share_heads") else self.num_heads

    @property
    def key_width(self) -> int:
        """The width of a key state per head. A decoder's cache stores key states."""
        return 0

    @property
    def logit_width(self) -> int:
        """The multiply-adds of one logit of a head; 0 if it is read from a table."""
        return self.key_width

    @property
    def token_products(self) -> int:
        """The multiply-adds for each token, before tokens meet: of its hidden state with the weights."""
        return sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))

    def project_keys(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Compute the key states (B, H, L, key_width). None if the logits do not depend on the keys' tokens."""
        return None

    @classmethod
    def require_options(cls, config: SynthesizerConfig) -> None:
        """Raise `InvalidConfigError` for options that are allowed alone but not together."""

    @property
    def starts_fresh(self) -> bool:
        """Whether a mixture may set the first logits to 0. False if an option has chosen them."""
        return True

    def components(self) -> Iterator[tuple[str, Synthesizer]]:
        """Iterate over the names and synthesizers of a mixture's parts; the synthesizer itself if it is no mixture."""
        yield self.variant, self

    def alpha(self) -> dict[str, torch.Tensor]:
        """Compute the weight (H,) of each part of a mixture that has a weight."""
        return {}

    @property
    def is_first_order(self) -> bool:
        """Whether `fit` writes a first-order term of the teacher's dot products."""
        return self.statistic is not None and self.statistic.needs_dot_products

    @property
    def can_fit(self) -> bool:
        """Whether `fit` serves the options of this layer."""
        return True

    def fit(self, fit: Fit) -> torch.Tensor | None:
        """Set the parameters to the closed form, from a statistic of the teacher. Without gradients.

        Returns:
            The mean logits (h, 1, N) that the parameters add for all queries alike; None if there are none.
        """
        raise TypeError(f"{type(self).__name__} must define fit(), because it names a statistic")

    def start_as_stock(self) -> None:
        """Make the logits those of the stock layer, if they contain them."""

    def synthesize(self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions) -> Logits:
        """Compute the logits of the queries at `hidden_states` (B, Lq, d)."""
        raise TypeError(f"{type(self).__name__} must define synthesize()")

    def static_table(self) -> torch.Tensor | None:
        """Compute the part of the logits that does not depend on the input, (H, N, N); None if there is none."""
        return None

    def input_terms(
        self, hidden_states: torch.Tensor, key_states: torch.Tensor | None, positions: Positions
    ) -> list[tuple[torch.Tensor | None, Logits]]:
        """The logits without `static_table`, as weighted terms."""
        return []

    def start_at_zero(self) -> None:
        """Make all logits exactly 0, with a gradient that is not 0 (for `mixing="sum"`)."""
        raise TypeError(f"{type(self).__name__} must define start_at_zero()")

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_states: torch.Tensor | None = None,
        positions: Positions | None = None,
    ) -> Logits:
        """Compute the logits for `hidden_states` (B, Lq, d). Without other arguments, the keys are the same Lq tokens.

        Raises:
            SequenceTooLongError: for more than `max_length` positions.
        """
        if positions is None:
            positions = Positions(hidden_states.shape[-2], hidden_states.shape[-2])
        if key_states is None:
            key_states = self.project_keys(hidden_states)
        if self.max_length:
            positions = positions.within(self.max_length, hidden_states.device)
        logits = self.synthesize(hidden_states, key_states, positions)
        window = self.config.options.get("window") if self.limits_reach else None
        return logits if window is None else Windowed(logits, window, self.config.sinks, positions)

    def split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """(B, L, H·x) → (B, H, L, x)."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, self.num_heads, -1).transpose(1, 2)

    def hidden_parameters(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Weights that `named_parameters` does not list: of each its name, the tensor, and whether it is trained."""
        return iter(())

    def extra_repr(self) -> str:
        shown = {"num_heads": self.num_heads, "max_length": self.max_length, **self.config.non_default()}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def load_stock(self, query: nn.Module, key: nn.Module, scaling: float) -> None:
        """Take over the stock layer's projections and scaling, if the variant uses them."""

    def stock_parts(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the (query, key) modules that started as stock projections, here and in parts."""
        for module in self.modules():
            if isinstance(module, Synthesizer) and module.stock_projections is not None:
                query, key = module.stock_projections
                yield module.get_submodule(query), module.get_submodule(key)

    def reset_parameters(self) -> None:
        """Initialise all tensors, as `nn.Linear.reset_parameters` does. A model built on `torch.device("meta")` needs
        it after `to_empty`.

        Tensors that Transformers has loaded keep their values. So do the stock projections: Transformers initialises
        them.
        """
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        kept = {id(tensor) for pair in self.stock_parts() for module in pair for tensor in module.parameters()}
        uninitialised = {
            name: tensor
            for name, tensor in tensors.items()
            if id(tensor) not in kept and not getattr(tensor, LOADED, False)
        }
        if uninitialised:
            device = next(iter(uninitialised.values())).device
            with torch.device(device), torch.no_grad():
                fresh = self.new()
                values = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
                for name, tensor in uninitialised.items():
                    tensor.copy_(values[name])

    def new(self) -> Synthesizer:
        """Build another synthesizer with the same arguments."""
        fresh = type(self)(self.hidden_size, self.num_heads, self.max_length, self.config, head_dim=self.head_dim)
        if self.causal:
            fresh.set_causal(True)
        return fresh

    def set_causal(self, causal: bool) -> None:
        """Say whether the layer is causal, as in a decoder.

        Raises:
            UnsupportedModelError: if it is, and the logits depend on the `whole_sequence`.
        """
        self.causal = causal
        if causal and self.whole_sequence:
            raise UnsupportedModelError(
                f"The variant {self.variant!r} chooses its keys over the whole sequence, so a decoder's query would "
                f"depend on later tokens. Patch an encoder with it (T5: layers={{'encoder': True}}), and give a "
                f"decoder sparse_strided, sparse_fixed, or a variant that chooses no keys."
            )
