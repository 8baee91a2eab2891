"""Which settings of distributed training carry a patched model: each is run with two gloo processes on a tiny model.

    python -m benchmarks.scaling.distributed                 # all that is installed, into benchmarks/results/settings.csv
    python -m benchmarks.scaling.distributed --settings ddp  # some

A setting carries a model if two processes, with half of the batch each or, under tensor parallelism, half of the weights,
have the losses of one process that has everything, step by step.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from benchmarks.measurements.records import RESULTS, ROOT, commit, quick_output
from examples.shared.command_line import leave_together
from hf_synthesizer import SynthesizerConfig, patch_model
from hf_synthesizer.layers.mixin import SynthesizerMixin

RESULT = RESULTS / "settings.csv"
SETTINGS = {
    "ddp": ("accelerate", "DistributedDataParallel by `Accelerator.prepare`"),
    "fsdp2": ("torch", "`fully_shard` of each layer, then of the model"),
    "zero1": ("deepspeed", "ZeRO stage 1"),
    "zero2": ("deepspeed", "ZeRO stage 2"),
    "zero3": ("deepspeed", "ZeRO stage 3, with attention layers as leaf modules"),
    "plugin2": ("accelerate", "ZeRO stage 2 by accelerate's `DeepSpeedPlugin`"),
    "plugin3": ("accelerate", "ZeRO stage 3 by accelerate's `DeepSpeedPlugin`, which names the leaf modules"),
    "tp": ("transformers", '`from_pretrained(folder, tp_plan="auto")`'),
}
VARIANTS = ("factorized_dense+salience", "random+dot_product", "dense", "factorized_random")
BATCH, LENGTH, STEPS, RATE, TOLERANCE = 4, 12, 3, 0.1, 1e-4


def tiny(setting: str) -> nn.Module:
    """A patched BERT; for tensor parallelism, which needs a model with a plan for it, a Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": len(VARIANTS), "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": 64, "max_position_embeddings": LENGTH}
    if setting == "tp":
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes))
    else:  # each process would draw its own dropout
        model = BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))
    return patch_model(model, {layer: SynthesizerConfig(name) for layer, name in enumerate(VARIANTS)})


def train(model: nn.Module, ids: torch.Tensor, step: Any, backward: Any) -> list[float]:
    """The loss of each step, averaged over the processes."""
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        backward(loss)
        step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def descent(model: nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(model, ids, step, torch.Tensor.backward)


def run(setting: str, ids: torch.Tensor) -> list[float]:
    """One process of two."""
    rank = int(os.environ["RANK"])
    own = ids[rank * BATCH // 2 : (rank + 1) * BATCH // 2]
    if setting == "tp":
        with tempfile.TemporaryDirectory() as folder:
            tiny(setting).save_pretrained(folder)
            return descent(AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto"), ids)
    if setting.startswith(("zero", "plugin")):
        return sharded(setting, own)
    model = tiny(setting)
    if setting == "ddp":
        from accelerate import Accelerator

        return descent(Accelerator(cpu=True).prepare(model), own)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return descent(fully_shard(model, mesh=mesh), own)


def sharded(setting: str, ids: torch.Tensor) -> list[float]:
    """ZeRO, by DeepSpeed itself or as accelerate's plugin."""
    import deepspeed

    model = tiny(setting)
    # Logits are lazy: what they are made of is needed until the layer ends.
    attention = {type(module) for module in model.modules() if isinstance(module, SynthesizerMixin)}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": int(setting[-1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if setting.startswith("plugin"):
        from accelerate import Accelerator, DeepSpeedPlugin

        leaves = {"transformer_moe_cls_names": ",".join(kind.__name__ for kind in attention)}
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False, **(leaves if setting[-1] == "3" else {}))
        accelerator = Accelerator(deepspeed_plugin=plugin)
        engine, prepared = accelerator.prepare(model, optimizer)

        def step() -> None:
            prepared.step()
            prepared.zero_grad()

        return train(engine, ids, step, accelerator.backward)
    deepspeed.init_distributed("gloo")
    if setting == "zero3":
        deepspeed.utils.set_z3_leaf_modules(model, list(attention))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return train(engine, ids, engine.step, engine.backward)


def launch(setting: str) -> list[float]:
    """Two processes, each of which runs this module."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "losses.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(
            [*command, "-m", "benchmarks.scaling.distributed", "--worker", str(result), "--settings", setting],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if not result.exists():
            sys.stderr.write(done.stderr)
            return [float("nan")] * STEPS
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument(
        "--output", type=Path, default=RESULT, help="the CSV file; settings that are not run keep their lines"
    )
    parser.add_argument("--worker", help="be one of two processes, and write the losses into this file")
    parser.add_argument("--quick", action="store_true", help="one setting, to show that everything works")
    options = parser.parse_args()
    if options.quick:
        options.settings, options.output = ["ddp"], quick_output(options.output)
    torch.manual_seed(1)
    ids = torch.randint(64, (BATCH, LENGTH))
    if options.worker:
        losses = run(options.settings[0], ids)
        if int(os.environ["RANK"]) == 0:
            Path(options.worker).write_text(json.dumps(losses))
        leave_together()
        return
    rows = {row["setting"]: row for row in csv.DictReader(options.output.open())} if options.output.exists() else {}
    for setting in options.settings:
        package, how = SETTINGS[setting]
        needed = {package, "deepspeed"} if setting.startswith("plugin") else {package}
        if any(find_spec(name) is None for name in needed):
            sys.stderr.write(f"{setting}: {' or '.join(sorted(needed))} is not installed.\n")
            continue
        found, wanted = torch.tensor(launch(setting)), torch.tensor(descent(tiny(setting), ids))
        apart = float((found - wanted).abs().max())  # not a number, if one is none
        rows[setting] = {
            "setting": setting,
            "how": how,
            "package": package,
            "version": release(package),
            "largest_difference": f"{apart:.1e}",
            "carries": "yes" if apart < TOLERANCE else "no",
            "commit": commit(),
        }
        sys.stderr.write(f"{setting}: losses differ by {apart:.1e}\n")
    with options.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(next(iter(rows.values()))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[setting] for setting in SETTINGS if setting in rows)


def release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
