"""Which feature of Transformers a test holds for which kind of variant: the marker `feature`, and what it may claim.

    @pytest.mark.feature("generate")                            # for the kinds of the test's own `variant`s, or its `kind`s
    @pytest.mark.feature("static cache", kinds=["hybrids"])     # for these
    @pytest.mark.feature("generate", refused=True)              # an error of ours says that it is not to be had
    @pytest.mark.feature("tensor parallelism", elsewhere=True)  # the test does its work in other processes

`docs/compatibility.py` makes the matrix of docs/compatibility.md of them. A test that does not patch a model with a variant of
each kind that it claims fails, and so does one that claims a refusal where none of our errors is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hf_synthesizer import SynthesizerConfig, SynthesizerError
from hf_synthesizer.models import installing
from hf_synthesizer.patching import swap
from hf_synthesizer.synthesizers.config import HeadGroupsConfig
from hf_synthesizer.synthesizers.registry import get_variant

KINDS = {
    "tables": "`random`, `fixed_random`, `factorized_random`",
    "rows": "`dense`, `factorized_dense`",
    "distances": "`relative`, `relative_dense`, alone or in a mixture",
    "mixtures": "mixtures of the others, and `salience`",
    "dot products": "`dot_product`, alone or in a mixture",
    "patterns": "`sparse_strided`, `sparse_fixed`",
    "choices": "`lsh_simple`, `alsh_…`, `routing`",
    "hybrids": "layers that differ, or stay stock",
    "heads": "heads of one layer that differ",
}
FEATURES = (
    "save_pretrained and the Auto classes",
    "pipeline",
    "deepcopy and pickle",
    "unpatch_model",
    "Trainer",
    "gradient checkpointing",
    "autocast",
    "bfloat16",
    "torch.compile in one graph",
    "eager and sdpa backends",
    "flash and flex backends",
    "output_attentions",
    "generate with a cache",
    "generate from left-padded rows",
    "static cache",
    "quantized cache",
    "continuous batching",
    "cross-attention",
    "LoRA",
    "prefix tuning",
    "fuse_for_inference",
    "transfer_attention",
    "torch.export",
    "torch.jit.trace",
    "ONNX",
    "int8 of the linear layers",
    "patching a quantized model",
)


def kind_of(variant: str) -> str:
    """The kind of a variant that all layers, and all heads of them, have."""
    parts = [get_variant(name) for name in variant.split("+")]
    if any(part.whole_sequence for part in parts):
        return "choices"
    if any(part.chooses_keys for part in parts):
        return "patterns"
    if "dot_product" in variant:
        return "dot products"
    if any("max_distance" in part.options for part in parts):
        return "distances"
    if len(parts) > 1 or variant == "salience":
        return "mixtures"
    return "rows" if variant in ("dense", "factorized_dense") else "tables"


def claims(item: pytest.Item) -> Iterator[tuple[str, list[str], pytest.Mark]]:
    """Feature, kinds and marker of each claim that this run of a test makes.

    Raises:
        ValueError: for a feature or a kind that the matrix does not know.
    """
    for marker in item.iter_markers("feature"):
        name, kinds = marker.args[0], marker.kwargs.get("kinds")
        if kinds is None:
            parameters = item.callspec.params
            variant = parameters.get("variant", parameters.get("name"))
            if "kind" in parameters:
                kinds = [parameters["kind"]]
            else:
                kinds = [kind_of(variant)] if isinstance(variant, str) else ["hybrids"]
        if name not in FEATURES or not set(kinds) <= KINDS.keys():
            raise ValueError(
                f"{item.nodeid} claims {name!r} for {kinds}; tests/helpers/features.py knows neither all of that."
            )
        yield name, list(kinds), marker


@pytest.fixture(autouse=True)
def claimed_kinds_are_tested(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test claims is what it does."""
    made = [
        (name, kinds, marker) for name, kinds, marker in claims(request.node) if not marker.kwargs.get("elsewhere")
    ]
    if not made:
        yield
        return
    patched: set[str] = set()
    asked: set[str] = set()
    errors: list[BaseException] = []
    install, check, start = swap.install, SynthesizerConfig.__init__, SynthesizerError.__init__

    def watch_install(model: Any, attention_layers: Any, plan: Any, *saved: Any) -> Any:
        asked.update(kinds_of(plan, len(attention_layers)))
        undo = install(model, attention_layers, plan, *saved)
        patched.update(kinds_of(plan, len(attention_layers)))
        return undo

    def watch_config(config: SynthesizerConfig, *arguments: Any, **options: Any) -> None:
        check(config, *arguments, **options)
        asked.add(kind_of(config.variant))

    def watch_error(error: SynthesizerError, *arguments: Any) -> None:
        start(error, *arguments)
        errors.append(error)

    monkeypatch.setattr(swap, "install", watch_install)
    monkeypatch.setattr(installing, "install", watch_install)
    monkeypatch.setattr(SynthesizerConfig, "__init__", watch_config)
    monkeypatch.setattr(SynthesizerError, "__init__", watch_error)
    yield
    for name, kinds, marker in made:
        refused = marker.kwargs.get("refused", False)
        missing = set(kinds) - (asked if refused else patched)
        assert not missing, f"{name!r} is claimed for {missing}, of which no model was patched"
        assert errors or not refused, f"{name!r} is claimed to be refused, and nothing was"


def kinds_of(plan: dict[str, Any], layers: int) -> set[str]:
    """The kinds of what the layers of a model get."""
    configs = set(map(repr, plan.values()))
    kinds = {"hybrids"} if len(configs) > 1 or len(plan) < layers else set()
    for config in plan.values():
        kinds |= {"heads"} if isinstance(config, HeadGroupsConfig) or config.heads else {kind_of(config.variant)}
    return kinds
