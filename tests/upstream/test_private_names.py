"""Private names of Transformers, PyTorch and accelerate stand in `hf_synthesizer/upstream/` alone, and the installed versions have all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from torch import nn

from hf_synthesizer import upstream

PACKAGE = Path(upstream.__file__).parents[1]
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "upstream"]
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
PRIVATE_MODULES = ("transformers.utils.output_capturing", "transformers.modeling_layers", "torch._C", "torch._dynamo")
LIBRARIES = ("transformers", "torch", "accelerate", "peft", "safetensors", "huggingface_hub", "sentence_transformers")
CLASSES = (nn.Module, transformers.PreTrainedModel, transformers.GenerationMixin, transformers.PreTrainedConfig)

ALLOWED = {
    "_modules": "every pickled module holds it",
    "_parameters": "every pickled module holds it",
    "_buffers": "every pickled module holds it",
    "_apply": "all of `to`, `half` and `cuda` call it",
    "_load_from_state_dict": "PyTorch documents it for authors of modules",
    "_init_weights": "Transformers documents it for authors of models",
    "_keys_to_ignore_on_load_missing": "Transformers documents it for authors of models",
    "_attn_implementation": "Transformers documents it for authors of models",
    "_fields": "Python documents it for named tuples",
    "_replace": "Python documents it for named tuples",
    "_fields_": "Python documents it for ctypes",
}
OUR_KEYS = {
    "_call",
    "_compared",
    "_dimensions",
    "_kept_keys",
    "_passes_keys_on",
    "_place_at_patch",
    "_stock_logit_parameters",
    "_values",
}
"""Attributes that the package itself puts into the `__dict__` of objects; those that start with `_synthesizer` need no entry."""
REGISTERED = {re.split(r"[.#:]", path)[-1] for path in upstream.REGISTER}


def own_names() -> set[str]:
    """Private names that the package defines."""
    names = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node, ast.Name) or (isinstance(node.value, ast.Name) and node.value.id == "self")
                names |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
            elif isinstance(node, ast.alias) and node.asname:
                names.add(node.asname)
    return names - REGISTERED


OWN = own_names()


def foreign_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of another library: attributes, imports, and strings that name attributes."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            overrides = isinstance(node.value, ast.Call) and ast.unparse(node.value).startswith("super(")
            names = [] if overrides and node.attr in REGISTERED else [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in LIBRARIES:
            module = node.module or ""
            paths = [f"{module}.{alias.name}" for alias in node.names]
            if any(f"{path}.".startswith(f"{private}.") for path in paths for private in PRIVATE_MODULES):
                yield node.lineno, module
            names = [part for path in paths for part in path.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Call) and re.search(r"__dict__\.(get|pop|setdefault)$", ast.unparse(node.func)):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("__dict__"):
            names = [node.slice.value] if isinstance(node.slice, ast.Constant) else []
        elif isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets):
            names = [
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
        for name in names:
            is_private = PRIVATE.fullmatch(name) and not name.startswith(("__", "_synthesizer"))
            if is_private and name not in OWN | ALLOWED.keys() | OUR_KEYS:
                yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_uses_no_private_name_of_another_library(path: Path) -> None:
    found = [f"line {line}: {name}" for line, name in foreign_names(ast.parse(path.read_text()))]
    assert not found, "take it from hf_synthesizer/upstream, with an entry in REGISTER"


@pytest.mark.parametrize(
    "line",
    [
        "torch._assert_async(used)",
        "from transformers.utils.output_capturing import OutputRecorder",
        "from torch.utils._python_dispatch import is_traceable_wrapper_subclass",
        "getattr(model, '_hf_peft_config_loaded', False)",
        "model.__dict__.get('_hf_hook')",
        "config.__dict__['_attn_implementation_internal'] = 'eager'",
        "HOOKS = ('forward', '_old_forward')",
        "torch._C._are_functorch_transforms_active()",
        "trainer._load_from_checkpoint(folder)",
        "model._initialize_weights(guard)",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert list(foreign_names(ast.parse(line)))


def test_private_methods_that_the_package_overrides_are_registered() -> None:
    classes = [
        node for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    methods = {node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}
    methods = {name for name in methods if PRIVATE.fullmatch(name) and not name.startswith("__")}
    overridden = {name for name in methods if any(hasattr(cls, name) for cls in CLASSES)}
    assert "_initialize_weights" in overridden
    assert overridden <= REGISTERED | ALLOWED.keys()


@pytest.mark.parametrize("path", upstream.REGISTER)
def test_the_installed_versions_have_each_name(path: str) -> None:
    if path.startswith("libtorch_cpu.so") and not any(
        Path(transformers.__file__).parents[1].glob("torch/lib/libtorch_cpu.so")
    ):
        pytest.skip("no library of PyTorch for Linux")
    assert upstream.look_up(path) is not None, upstream.explain_missing(path)


def test_only_names_of_the_register_are_looked_up() -> None:
    with pytest.raises(KeyError, match="register"):
        upstream.look_up("torch._foreach_add")
