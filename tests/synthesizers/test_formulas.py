"""Every variant equals a naive loop over its formula: standalone, in BERT and in T5."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_synthesizer import SynthesizerAttention, SynthesizerConfig, patch_model
from tests.helpers import naive
from tests.helpers.models import CHOOSING, build, mask, randomize

N, HEADS, WIDTH = 12, 3, 12
LENGTHS = (1, 2, N - 1, N)
PADDINGS = ("none", "right", "left", "full")


def numpy_state(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}


def naive_rows(synthesizer, values, hidden_states, keep, *, causal=False, bias=0.0, scaling=None):
    """The naive weights and outputs of a whole batch: (B, H, L, L) and (B, L, H·d_v)."""
    config, options = synthesizer.config, {} if scaling is None else {"scaling": scaling}
    chooses = config.variant in CHOOSING
    options |= {"causal": causal, "max_length": synthesizer.max_length} if chooses else {"mixing": config.mixing}
    # The saved directions tell `num_hashes`.
    options |= {name: value for name, value in config.options.items() if name != "num_hashes"} if chooses else {}
    rows = []
    for row, value, visible in zip(hidden_states.double().numpy(), values.double().numpy(), keep, strict=True):
        own = {"keep": visible.bool().tolist()} if chooses else {"first": int(visible.bool().int().argmax())}
        scores = naive.logits(config.variant, numpy_state(synthesizer), row, synthesizer.num_heads, **options, **own)
        rows.append(naive.attention(scores + bias, value, visible.bool().tolist(), causal))
    weights, outputs = zip(*rows, strict=True)
    return torch.tensor(np.stack(weights)), torch.tensor(np.stack(outputs))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_standalone_layer(variant: str, length: int, padding: str) -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, variant=variant, max_length=N)).eval()
    hidden_states, keep = torch.randn(3, length, WIDTH), mask(3, length, padding)
    value = layer.value(hidden_states).view(3, length, HEADS, -1).transpose(1, 2).detach()
    expected_weights, expected = naive_rows(layer.synthesizer, value, hidden_states, keep)

    with torch.no_grad():
        output, weights = layer(hidden_states, keep)
        fast, none = layer(hidden_states, keep, need_weights=False)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-5)
    expected = layer.output(expected.float()).detach()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-5)
    assert none is None


@pytest.mark.parametrize("mixing", ["softmax", "sum"])
@pytest.mark.parametrize("variant", ["random+dense+dot_product", "factorized_dense+salience", "dense+salience"])
def test_mixing_weights(variant: str, mixing: str) -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, variant=variant, max_length=N, mixing=mixing)).eval()
    hidden_states, keep = torch.randn(2, 5, WIDTH), mask(2, 5, "right")
    value = layer.value(hidden_states).view(2, 5, HEADS, -1).transpose(1, 2).detach()
    expected, _ = naive_rows(layer.synthesizer, value, hidden_states, keep)
    torch.testing.assert_close(layer(hidden_states, keep)[1].double(), expected, rtol=1e-5, atol=1e-5)


def test_causal_layer(variant: str) -> None:
    layer = randomize(SynthesizerAttention(WIDTH, HEADS, variant=variant, max_length=N)).eval()
    hidden_states, keep = torch.randn(3, 7, WIDTH), mask(3, 7, "right")
    value = layer.value(hidden_states).view(3, 7, HEADS, -1).transpose(1, 2).detach()
    expected_weights, expected = naive_rows(layer.synthesizer, value, hidden_states, keep, causal=True)
    with torch.no_grad():
        output, weights = layer(hidden_states, keep, is_causal=True)
        fast, _ = layer(hidden_states, keep, is_causal=True, need_weights=False)
    expected = layer.output(expected.float()).detach()
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-5)


def test_shared_heads() -> None:
    for variant in ("random", "fixed_random", "factorized_random", "dense", "factorized_dense"):
        layer = SynthesizerAttention(WIDTH, HEADS, SynthesizerConfig(variant, max_length=N, share_heads=True)).eval()
        randomize(layer)
        synthesizer = layer.synthesizer
        state = numpy_state(synthesizer)
        tables = [name for name in state if not name.startswith("hidden.")]
        assert tables and all(len(state[name]) == 1 for name in tables)
        state |= {name: state[name].repeat(HEADS, 0) for name in tables}
        hidden_states = torch.randn(1, 5, WIDTH)
        expected = naive.logits(variant, state, hidden_states[0].double().numpy(), HEADS)
        actual = synthesizer(hidden_states).materialize()[0].detach().double()
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("head", ["BertModel", "BertLMHeadModel", "T5EncoderModel", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("padding", ["right", "full"])
def test_inside_a_model(variant: str, head: str, backend: str, padding: str) -> None:
    """The module that a model runs gets the model's masks, and equals the loop as well."""
    model = build(head)
    model.set_attn_implementation(backend)
    patch_model(model, variant)
    is_t5, decodes = head.startswith("T5"), head in ("BertLMHeadModel", "T5ForConditionalGeneration")
    stack = (model.decoder if decodes else model.encoder).block if is_t5 else model.base_model.encoder.layer
    module = stack[0].layer[0].SelfAttention if is_t5 else stack[0].attention.self
    randomize(module.synthesizer)
    seen = {}
    module.register_forward_hook(
        lambda _, args, kwargs, output: seen.update(args=args, kwargs=kwargs, output=output), with_kwargs=True
    )
    length, keep = 6, mask(3, 6, padding)
    ids = torch.randint(2, 64, (3, length))
    with torch.no_grad():
        if head == "T5ForConditionalGeneration":
            model(input_ids=ids, decoder_input_ids=ids, decoder_attention_mask=keep, use_cache=False)
        else:
            model(input_ids=ids, attention_mask=keep)
    hidden_states = seen["args"][0]
    value = (module.v if is_t5 else module.value)(hidden_states).view(3, length, HEADS, -1).transpose(1, 2).detach()
    bias = module.compute_bias(length, length)[0].double().detach().numpy() if is_t5 else 0.0
    scaling = 1.0 if is_t5 else None
    expected_weights, expected = naive_rows(
        module.synthesizer, value, hidden_states, keep, causal=decodes, bias=bias, scaling=scaling
    )
    if is_t5:
        expected = module.o(expected.float()).detach()
    torch.testing.assert_close(seen["output"][0], expected.float(), rtol=1e-5, atol=1e-5)
    if backend == "eager":
        torch.testing.assert_close(seen["output"][-1].double(), expected_weights, rtol=1e-5, atol=1e-5)
