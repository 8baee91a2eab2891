"""What is asked of PyTorch by its private names, and by the public ones that stand for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_synthesizer.upstream import torch_names

KERNELS = ("flash", "efficient", "cudnn")


@pytest.mark.parametrize("kernel", [*KERNELS, None])
def test_an_nvidia_gpu_is_asked_by_public_names(kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(1, 1, 8, 64) for _ in range(3)]
    parameters = torch.backends.cuda.SDPAParams

    def read(query: Any, *others: Any) -> Any:
        return parameters(tensors[0], *others)  # the installed PyTorch takes these arguments

    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", read)
    for name in KERNELS:
        monkeypatch.setattr(
            torch.backends.cuda, f"can_use_{name}_attention", lambda arguments, name=name: name == kernel
        )
    query: Any = SimpleNamespace(device=torch.device("cuda"))
    assert torch_names.has_fused_attention(query, *tensors[1:], None, 0.1, True) == (kernel is not None)


def test_other_devices_are_asked_by_a_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(1, 1, 8, 64) for _ in range(3)]
    assert torch_names.has_fused_attention(*tensors, None, 0.0, False)
    monkeypatch.setattr(torch_names, "_fused_choice", None)
    assert not torch_names.has_fused_attention(*tensors, None, 0.0, False)


HOOKS = {
    "a module's": lambda module: module.register_forward_hook(lambda *_: None),
    "a module's, before": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "a module's, backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "all modules'": lambda module: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "all modules', before": lambda module: nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
    "all modules', backward": lambda module: nn.modules.module.register_module_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_each_kind_of_hook_is_seen(kind: str) -> None:
    module = nn.Linear(2, 2)
    assert not torch_names.has_hooks(module)
    handle = HOOKS[kind](module)
    try:
        assert torch_names.has_hooks(module)
    finally:
        handle.remove()
    assert not torch_names.has_hooks(module)


def test_versions_and_bases_of_tensors() -> None:
    whole = torch.zeros(2, 3)
    assert torch_names.base_of(whole) is None and torch_names.base_of(whole[0]) is whole
    version = torch_names.version_of(whole)
    assert torch_names.version_of(whole) == version
    assert torch_names.version_of(whole.add_(1)) != version
