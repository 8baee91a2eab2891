"""What becomes of one model type: which layers can be patched, what serves them, and whether the laws hold."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.measurements.records import Row
from benchmarks.model_types.laws import HOLDS, LAWS, Subject
from benchmarks.model_types.tiny_models import NotBuilt, Tiny, build, run
from hf_synthesizer import patch_model
from hf_synthesizer.errors import InvalidConfigError, SequenceTooLongError, SynthesizerError
from hf_synthesizer.layers import synthesizer_class
from hf_synthesizer.layers.finding import stock_classes
from hf_synthesizer.layers.finding.attention_layers import AttentionLayer, find_attention_layers
from hf_synthesizer.layers.lengths import config_of, known_length
from hf_synthesizer.layers.mixin import SynthesizerMixin
from hf_synthesizer.layers.stock_forward import StockForwardLayer

FIELDS = ("model_type", "model", "attention", "stacks", "layer_class", "status", "why", *LAWS, "transformers")
SERVED, REFUSED, WRONG, NOT_BUILT = "served", "refused", "wrong", "not built"
LONGEST = 1024
"""The `max_length` of a type whose config names none."""


def examine(model_type: str) -> Row:
    """The row of a type."""
    row = dict.fromkeys(FIELDS, "") | {"model_type": model_type, "transformers": version("transformers")}
    try:
        tiny = build(model_type)
        require_layers(tiny.model)
    except NotBuilt as error:
        return row | without_inputs(error)
    except SynthesizerError as error:
        return row | {"model": type(tiny.model).__name__, "status": REFUSED, "why": one_line(error)}
    row["model"] = type(tiny.model).__name__
    try:
        attention_layers = reached(tiny)
        if not attention_layers:
            return row | {"status": NOT_BUILT, "why": "its inputs reach no layer of self-attention"}
        subject, served, refusals = serve(tiny, attention_layers)
        shown = served or attention_layers
        row["attention"] = together(name_of_attention(type(attention_layer.module)) for attention_layer in shown)
        row["stacks"] = together(attention_layer.stack for attention_layer in shown)
        row["layer_class"] = together(layer_class_of(type(attention_layer.module)) for attention_layer in shown)
        row["why"] = "; ".join(refusals)
        if not served:
            return row | {"status": REFUSED}
        return row | judge(subject, row["why"])
    except SynthesizerError as error:
        return row | {"status": REFUSED, "why": one_line(error)}
    except Exception as error:  # noqa: BLE001 - whatever happens to one type becomes its row
        return row | {"status": WRONG, "why": f"{type(error).__name__}: {one_line(error)}"}


def require_layers(model: PreTrainedModel) -> None:
    """Let the library say why not, where a model has no layer that it could patch."""
    if not find_attention_layers(model)[0]:
        patch_model(model, "random")


def without_inputs(error: NotBuilt) -> Row:
    """What is to be said of a type that did not run: that it has nothing to patch, if so."""
    if error.model is not None:
        try:
            require_layers(error.model)
        except SynthesizerError as refused:
            return {"model": type(error.model).__name__, "status": REFUSED, "why": one_line(refused)}
    return {"status": NOT_BUILT, "why": one_line(error)}


def reached(tiny: Tiny) -> list[AttentionLayer]:
    """The self-attention layers of a model that its inputs reach."""
    attention_layers, _ = find_attention_layers(tiny.model)
    called: set[str] = set()

    def note(name: str) -> None:
        called.add(name)

    hooks = [
        attention_layer.module.register_forward_pre_hook(
            lambda module, arguments, name=attention_layer.name: note(name)
        )
        for attention_layer in attention_layers
    ]
    try:
        with torch.no_grad():
            run(tiny.model, tiny.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [attention_layer for attention_layer in attention_layers if attention_layer.name in called]


def serve(tiny: Tiny, attention_layers: list[AttentionLayer]) -> tuple[Subject, list[AttentionLayer], list[str]]:
    """The layers that can be patched, stack by stack where not all can, and what was said of the others."""
    whole = Subject(tiny.model, tiny.inputs, frozenset(attention_layer.name for attention_layer in attention_layers))
    refusals: list[str] = []
    reason = refusal(whole)
    if isinstance(reason, InvalidConfigError):
        known = [
            known_length(config_of(attention_layer, tiny.model.config), attention_layer.stack)
            for attention_layer in attention_layers
        ]
        if None in known:
            refusals.append("max_length= has to be given")
        # Beside a tiny model the tables for its own longest sequence may be large, and have to be asked for.
        whole.options["max_length"] = max(LONGEST if length is None else length for length in known)
        reason = refusal(whole)
    if reason is None:
        return whole, attention_layers, refusals
    if isinstance(reason, SequenceTooLongError):
        raise RuntimeError(f"the longest sequence is not what the config says: {one_line(reason)}")
    served: list[AttentionLayer] = []
    for stack in dict.fromkeys(attention_layer.stack for attention_layer in attention_layers):
        own = [attention_layer for attention_layer in attention_layers if attention_layer.stack == stack]
        reason = refusal(
            Subject(tiny.model, tiny.inputs, frozenset(attention_layer.name for attention_layer in own), whole.options)
        )
        if reason is None:
            served += own
        else:
            refusals.append(f"{stack}: {one_line(reason)}")
    return (
        Subject(tiny.model, tiny.inputs, frozenset(attention_layer.name for attention_layer in served), whole.options),
        served,
        refusals,
    )


def refusal(subject: Subject) -> SynthesizerError | None:
    """What the library says when these layers are patched and run."""
    try:
        for variant in ("random", "random+dot_product", "random+salience"):
            with subject.patched(variant) as model:
                run(model, subject.inputs)
    except SynthesizerError as error:
        return error
    return None


def judge(subject: Subject, note: str) -> Row:
    """What becomes of each law."""
    verdicts: Row = {}
    for name, law in LAWS.items():
        try:
            verdicts[name] = one_line(law(subject))
        except SynthesizerError as error:
            return {**verdicts, name: "refused", "status": REFUSED, "why": f"{name}: {one_line(error)}"}
        except Exception as error:  # noqa: BLE001 - a law that cannot be checked does not hold
            verdicts[name] = f"{type(error).__name__}: {one_line(error)}"
    broken = [f"{name}: {verdict}" for name, verdict in verdicts.items() if not passes(verdict)]
    return {**verdicts, "status": WRONG if broken else SERVED, "why": "; ".join([*filter(None, [note]), *broken])}


def passes(verdict: str) -> bool:
    return verdict == HOLDS or verdict.startswith("(")


def layer_class_of(stock: type[nn.Module]) -> str:
    """The name of the layer class that serves an attention class."""
    made = synthesizer_class(stock)
    if issubclass(made, StockForwardLayer):
        return "StockForwardLayer"
    return next(
        cls.__name__ for cls in made.__mro__ if "forward" in cls.__dict__ and issubclass(cls, SynthesizerMixin)
    )


def name_of_attention(stock: type[nn.Module]) -> str:
    """What comes behind "Synthesizer" in the name of the synthesized class."""
    return stock_classes.name_of_attention(stock).removeprefix(stock_classes.PREFIX)


def together(names: Iterable[str]) -> str:
    return " ".join(sorted(set(names)))


def one_line(text: object) -> str:
    """An error or a verdict on one line, without what differs from run to run."""
    line = re.sub(r"\s+", " ", str(text)).strip()
    line = re.sub(r"0x[0-9a-f]+", "0x…", re.sub(r"/\S*/", "…/", line))
    return line if len(line) <= 400 else line[:399] + "…"
