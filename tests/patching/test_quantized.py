"""Patching a model that was quantized before: float synthesizers beside whatever the other layers became, or a refusal."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_synthesizer import UnsupportedModelError, list_variants, patch_model, patch_report, unpatch_model
from tests.helpers.models import CHOOSING, batch, build, first_output

HEADS = ("BertForSequenceClassification", "T5EncoderModel", "T5ForConditionalGeneration")


class EightBits(torch.Tensor):
    """A weight as torchao and quanto keep it: a tensor that looks like the original, and holds integers and a scale."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=dtype, device=whole.device)

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
        self.whole, self.scale = whole, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> EightBits:
        scale = weight.abs().amax() / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def __tensor_flatten__(self):
        return ["whole", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, dtype, size, stride):
        return EightBits(inner["whole"], inner["scale"], dtype)

    def numbers(self) -> torch.Tensor:
        return self.whole.to(self.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is F.linear:
            tensor, weight, *bias = arguments
            return F.linear(tensor, weight.numbers(), *bias, **(keywords or {}))
        return super().__torch_function__(function, types, arguments, keywords or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            made = arguments[0]
            return cls(made.whole, made.scale, (keywords or {}).get("dtype") or made.dtype)
        raise NotImplementedError(f"{function} of quantized weights")


class PackedLinear(nn.Linear):
    """A layer as bitsandbytes makes it: a subclass whose weight is packed integers of another shape."""

    def __init__(self, stock: nn.Linear):
        super().__init__(stock.in_features, stock.out_features, bias=False, device="meta")
        self.scale = float(stock.weight.detach().abs().amax() / 127)
        packed = (stock.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed.flatten()[:, None], requires_grad=False)
        self.bias = stock.bias

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view(self.out_features, self.in_features).to(tensor.dtype)
        return F.linear(tensor, weight * self.scale, self.bias)


class SubclassedLinear(nn.Linear):
    """A layer as quanto makes it: a subclass with a tensor subclass in it."""


def by_torch(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao will take its place
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def like_torchao(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(EightBits.of(module.weight.detach()), requires_grad=False)
    return model


def like_bitsandbytes(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, PackedLinear(module))
    return model


def like_quanto(model: nn.Module) -> nn.Module:
    for module in like_torchao(model).modules():
        if type(module) is nn.Linear:
            module.__class__ = SubclassedLinear
    return model


QUANTIZERS = {f.__name__: f for f in (by_torch, like_torchao, like_bitsandbytes, like_quanto)}


def quantized(head: str, quantizer: str, dtype: torch.dtype = torch.float32) -> Any:
    return QUANTIZERS[quantizer](build(head, **({"initializer_range": 0.1} if head[0] == "B" else {})).to(dtype))


def run(model: Any, head: str) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return first_output(model(**batch(head)))


def gradients(model: Any, head: str) -> list[nn.Parameter]:
    """The synthesizers' parameters after a backward."""
    first_output(model(**batch(head))).pow(2).mean().backward()
    return [p for name, p in model.named_parameters() if ".synthesizer." in name and "dot_product" not in name]


@pytest.mark.feature("patching a quantized model")
@pytest.mark.parametrize(
    "variant", [*(name for name in list_variants() if name not in CHOOSING), "random+dot_product"]
)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("head", HEADS)
def test_a_quantized_model_gets_float_synthesizers(head: str, quantizer: str, variant: str) -> None:
    model = quantized(head, quantizer)
    expected = run(model, head)
    patch_model(model, variant)
    made = run(model, head)
    assert made.isfinite().all()
    if variant == "dot_product":  # keeps the quantized projections
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert "attention layers synthesized" in str(patch_report(model))
    if quantizer != "by_torch" and variant not in ("dot_product", "fixed_random"):  # torch's has no backward
        assert any(p.grad is not None for p in gradients(model, head))
    unpatch_model(model)
    assert torch.equal(run(model, head), expected)


@pytest.mark.parametrize("variant", ["random", "dense+salience", "dense+dot_product"])
@pytest.mark.parametrize("quantizer", ["like_torchao", "like_bitsandbytes", "like_quanto"])
@pytest.mark.parametrize("head", HEADS[:2])
def test_a_quantized_model_in_half_precision(head: str, quantizer: str, variant: str) -> None:
    model = patch_model(quantized(head, quantizer, torch.bfloat16), variant)
    synthesizer = next(module.synthesizer for module in model.modules() if hasattr(module, "synthesizer"))
    assert all(p.dtype == torch.bfloat16 for p in synthesizer.parameters() if p.is_floating_point())
    assert run(model, head).isfinite().all()


@pytest.mark.feature("patching a quantized model", refused=True)
@pytest.mark.parametrize("variant", CHOOSING)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_variants_that_average_projections_refuse_quantized_ones(quantizer: str, variant: str) -> None:
    model = quantized(HEADS[0], quantizer)
    expected, classes = run(model, HEADS[0]), [type(module) for module in model.modules()]
    with pytest.raises(
        UnsupportedModelError, match="mean of the stock query and key.*quantized.*before it is quantized"
    ):
        patch_model(model, variant)
    assert classes == [type(module) for module in model.modules()]
    assert torch.equal(run(model, HEADS[0]), expected)
