"""The errors of the library. Each message says what was asked, what was found, what is allowed and what to do next."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SynthesizerError(Exception):
    """Any error raised by hf_synthesizer on purpose."""


class UnknownVariantError(SynthesizerError, ValueError):
    """The name of a variant, or of a part of a mixture, that is not registered."""


class InvalidConfigError(SynthesizerError, ValueError):
    """A configuration that cannot be built: an unknown key, a bad value, an option that the variant does not use."""


class UnsupportedModelError(SynthesizerError, TypeError):
    """A model, or an attention backend, that no registered model type serves."""


class NoMatchingLayerError(SynthesizerError, ValueError):
    """A layer selection that selects nothing, or a layer that the model does not have."""


class AlreadyPatchedError(SynthesizerError, RuntimeError):
    """A model that holds synthesized attention already."""


class NotPatchedError(SynthesizerError, RuntimeError):
    """A model that cannot be unpatched, because it never was patched in this process."""


class FusedModelError(SynthesizerError, RuntimeError):
    """Something that a model fused for inference, or a model that is to be fused, cannot do."""


class FusedParameterError(FusedModelError, AttributeError):
    """A parameter that is out of reach while its layer is fused."""


class SequenceTooLongError(SynthesizerError, ValueError):
    """A sequence longer than the `max_length` the synthesizer was built for."""


class AttentionInputError(SynthesizerError, RuntimeError, ValueError):
    """Tensors of one call of attention that do not fit each other, such as a mask; a `RuntimeError` as PyTorch's own is."""


class CheckpointMismatchError(SynthesizerError, RuntimeError, ValueError):
    """A checkpoint that does not hold what its configuration promises; a `RuntimeError` as Transformers' own is."""


class DataError(SynthesizerError, ValueError):
    """Data or a task that cannot be trained on; the message is one sentence for the user."""


def first_line(error: BaseException) -> str:
    """The beginning of what another library's error says, which may go on for a page; its name where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def loading(what: str, name: str) -> Iterator[None]:
    """Around whatever loads by a name of the Hub or of a folder.

    Raises:
        InvalidConfigError: instead of Transformers' own errors, which are a page long.
    """
    try:
        yield
    except SynthesizerError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        where = "" if os.path.exists(name) else ", which is no folder here,"
        raise InvalidConfigError(f"The {what} {name}{where} cannot be loaded: {first_line(error)}") from error


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """' Did you mean …?' for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
