"""Adds the model types of patched checkpoints to `AutoConfig` when Transformers imports its mapping of model types.

So the import of this package imports neither Transformers nor torch, and `hf-synthesizer --help` is fast. Nothing else of
Transformers changes. If the mapping is there already, it gets our entries now.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MAPPING = "transformers.models.auto.configuration_auto"


def serve_when_imported() -> None:
    """Serve the model types now, or when Transformers' mapping of them is imported: once."""
    if hasattr(sys.modules.get(MAPPING), "CONFIG_MAPPING"):
        _serve()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _serve() -> None:
    importlib.import_module(".model_types", __package__).serve_model_types()


class _Finder(MetaPathFinder):
    """Finds that one module with the other finders, and removes itself."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MAPPING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module by its own loader, then serves the model types."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _serve()
