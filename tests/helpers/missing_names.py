"""Takes away one private name after the other, each in a process that is forked from one that has imported all other libraries.

`python -m tests.helpers.missing_names` prints one line of JSON for each name: what happened to a package that never saw it. Names
that share an entry of the register are taken away together.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.models.bert import modeling_bert  # noqa: F401 - before the fork

LENGTH = 64
IDS = torch.arange(2 * LENGTH).view(2, LENGTH) % 90


def build() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=90,
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return BertForSequenceClassification(config).eval()


def answer(model: nn.Module) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[1, 50:] = 0
    return model(input_ids=IDS, attention_mask=mask).logits


def try_patched() -> dict[str, Any]:
    """Logits and gradients of a patched model, logits of its checkpoint, operations; and what an Auto class says of the checkpoint."""
    from hf_synthesizer import count_flops, patch_model
    from hf_synthesizer.models import SynthesizerBertForSequenceClassification

    model = build()
    operations = count_flops(model, IDS)
    torch.manual_seed(1)
    patch_model(model, "factorized_dense+dot_product")
    logits = answer(model)
    logits.sum().backward()
    grads = [p.grad.abs().sum() for p in model.parameters() if p.grad is not None]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = answer(SynthesizerBertForSequenceClassification.from_pretrained(folder).eval())
        model.set_attn_implementation("eager")
        attentions = model(IDS, output_attentions=True).attentions
        try:
            auto_class = type(AutoModelForSequenceClassification.from_pretrained(folder)).__name__
        except ValueError as error:
            auto_class = str(error)
    numbers = [*logits.flatten().tolist(), *loaded.flatten().tolist(), float(sum(grads)), operations]
    return {"numbers": numbers, "auto class": auto_class, "attentions": attentions is not None and len(attentions)}


def try_assertion() -> dict[str, Any]:
    from hf_synthesizer.upstream.torch_names import assert_async

    assert_async(torch.tensor(True), "a message")
    return {}


def try_conversions() -> dict[str, Any]:
    from hf_synthesizer.upstream.transformers_names import set_conversions

    set_conversions(build(), ["a conversion"])
    return {}


def try_offloaded() -> dict[str, Any]:
    from accelerate import cpu_offload

    from hf_synthesizer import patch_model

    model = build()
    cpu_offload(model, execution_device=torch.device("cpu"))
    patch_model(model, "dense")
    return {}


def try_push() -> dict[str, Any]:
    from hf_synthesizer import patch_model

    patch_model(build(), "dense").push_to_hub("somebody/something")
    return {}


def try_transform() -> dict[str, Any]:
    """A derivative by torch.func, of logits that are so many that a backward of our own would serve them."""
    from hf_synthesizer import SynthesizerAttention

    layer = SynthesizerAttention(16, 2, variant="factorized_dense", max_length=300).eval()
    x = torch.randn(2, 300, 16)
    return {"numbers": torch.func.grad(lambda x: layer(x, need_weights=False)[0].sum())(x).flatten()[:8].tolist()}


TRIALS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch._assert_async": try_assertion,
    "torch._C._are_functorch_transforms_active": try_transform,
    "transformers.PreTrainedModel._upload_modified_files": try_push,
    "transformers.core_model_loading#_weight_conversions": try_conversions,
    "accelerate.hooks#_hf_hook": try_offloaded,
}
"""What is tried besides `try_patched`, where a name is gone that it does not need."""


def before_the_package() -> tuple[Any, Callable[[], None]]:
    """The room `upstream` of a package whose own `__init__` has not run, and a function that runs it."""
    spec = importlib.util.find_spec("hf_synthesizer")
    assert spec is not None and spec.loader is not None
    package = sys.modules["hf_synthesizer"] = importlib.util.module_from_spec(spec)
    return importlib.import_module("hf_synthesizer.upstream"), lambda: spec.loader.exec_module(package)  # type: ignore[union-attr]


def import_everything() -> None:
    import hf_synthesizer

    for module in pkgutil.walk_packages(hf_synthesizer.__path__, "hf_synthesizer."):
        if not module.name.endswith("__main__") and ".triton" not in module.name:
            importlib.import_module(module.name)


class Log(logging.Handler):
    """Collects the warnings of the room."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without(paths: list[str], stock: torch.Tensor) -> dict[str, Any]:
    """What the package does if names are gone: whether stock models are untouched, numbers or an error, and warnings."""
    log = Log()
    logging.getLogger("hf_synthesizer").addHandler(log)
    os.environ["HF_SYNTHESIZER_NATIVE"] = "1" if any(path.startswith("libtorch") for path in paths) else "0"
    upstream, run_package = before_the_package()
    resolve = upstream._resolve
    upstream._resolve = lambda name: None if name in paths else resolve(name)
    run_package()
    import_everything()
    with torch.no_grad():
        result: dict[str, Any] = {"stock is untouched": torch.equal(answer(build()), stock)}
    for trial in (try_patched, *(TRIALS[path] for path in paths if path in TRIALS)):
        try:
            result[trial.__name__] = trial()
        except Exception as error:
            result[trial.__name__] = f"{type(error).__name__}: {error}"
    return {**result, "warnings": log.lines}


def forked(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a task in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer_bytes = json.dumps(task()).encode()
        except BaseException:
            answer_bytes = json.dumps({"error": traceback.format_exc()}).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer_bytes)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return json.loads(content)


def main() -> None:
    assert "hf_synthesizer.upstream" not in sys.modules
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with torch.no_grad():
        stock = answer(build())
    first = forked(list_names)
    for module in first["modules"]:
        with suppress(Exception):  # so that no child has to
            importlib.import_module(module)
    for paths in ([], *first["groups"]):
        result = forked(lambda paths=paths: without(paths, stock))  # type: ignore[misc]
        for path in paths or [None]:
            print(json.dumps([path, result]), flush=True)


def list_names() -> dict[str, Any]:
    """The names of the register, in groups that share an entry, and all modules of other libraries that the package imports."""
    register = importlib.import_module("hf_synthesizer.upstream").REGISTER
    groups: dict[int, list[str]] = {}
    for path, entry in register.items():
        groups.setdefault(id(entry), []).append(path)
    import_everything()
    try_patched()
    others = [module for module in sys.modules if not module.startswith(("hf_synthesizer", "__"))]
    return {"groups": list(groups.values()), "modules": others}


if __name__ == "__main__":
    main()
