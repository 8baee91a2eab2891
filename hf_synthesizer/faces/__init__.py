"""The faces that Transformers models see. One file for each forward signature, imported at its first use."""

from .registry import Family, family_of, get_family, list_families, load_built_in_families, register_family

__all__ = ["Family", "family_of", "get_family", "list_families", "load_built_in_families", "register_family"]
