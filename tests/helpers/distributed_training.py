"""A training loop of accelerate on a patched model, for one process or several; test_accelerate.py launches it.

    python -m tests.helpers.distributed_training none OUT
    torchrun --standalone --nproc_per_node 2 -m tests.helpers.distributed_training ddp OUT

It writes the loss of each step, the evaluation and the checkpoint into OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from examples.shared.command_line import leave_together
from hf_synthesizer import SynthesizerConfig, patch_model
from tests.helpers.models import build

SPEC = {0: SynthesizerConfig("random+dot_product"), 1: "factorized_dense+salience"}
ROWS, GLOBAL_BATCH = 15, 4  # the last batch holds three rows


def main(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    # Each process draws its own dropout, so that without it alone the processes can be compared.
    model = build("BertForSequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    patch_model(model, SPEC)
    accelerator = Accelerator(cpu=True)
    ids = torch.randint(4, 64, (ROWS, 9))
    rows = TensorDataset(ids, ids[:, 0] % 2)
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(rows, batch_size=batch_size)
    evaluation = accelerator.prepare(loader)  # fills up the last batch; gather_for_metrics drops what it added
    accelerator.even_batches = False
    if kind == "fsdp":  # accelerate shards on accelerators only, torch on the CPU as well
        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, optimizer = accelerator.prepare(loader, optimizer)

    losses = []
    for _ in range(2):
        for input_ids, labels in loader:
            count = accelerator.reduce(torch.tensor(float(len(labels))), "sum")
            loss = functional.cross_entropy(model(input_ids=input_ids).logits, labels, reduction="sum") / count
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over the processes
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "sum").item())

    model.eval()
    predictions = []
    with torch.no_grad():
        for input_ids, labels in evaluation:
            logits, labels = accelerator.gather_for_metrics((model(input_ids=input_ids).logits, labels))
            predictions.append(logits)
    logits = torch.cat(predictions)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{folder}/checkpoint",
        is_main_process=accelerator.is_main_process,
        state_dict=get_model_state_dict(model, options=whole) if kind == "fsdp" else accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        result = {"losses": losses, "logits": logits.tolist(), "processes": accelerator.num_processes}
        Path(folder, "result.json").write_text(
            json.dumps({**result, "class": type(model).__name__, "input_ids": ids.tolist()})
        )
    leave_together()


if __name__ == "__main__":
    main(*sys.argv[1:])
