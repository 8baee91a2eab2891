"""The synthesized classes of every model type, made when they are first asked for: `SynthesizerLlamaForCausalLM`,
`SynthesizerLlamaConfig`, `SynthesizerLlamaAttention`.

Each stands in this module under its name, so that it can be imported and pickled, and found by a checkpoint's `auto_map`.
"""

from __future__ import annotations

PREFIX = "Synthesizer"


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .classes import synthesized_class

        return synthesized_class(name.removeprefix(PREFIX))
    except (ImportError, LookupError) as error:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: the installed transformers has no class "
            f"{name.removeprefix(PREFIX)!r} that could be synthesized ({error})"
        ) from error
