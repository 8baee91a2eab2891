"""Two processes train and generate with a patched model under Transformers' tensor parallelism; test_tensor_parallel.py
launches them.

    torchrun --standalone --nproc_per_node 2 -m tests.helpers.tensor_parallel FOLDER

FOLDER holds a patched checkpoint in `patched` and a stock one in `stock`; what was computed goes into `result.pt`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import hf_synthesizer
from examples.shared.command_line import leave_together
from hf_synthesizer.errors import UnsupportedModelError


def main(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/patched", tp_plan="auto").eval()
    ids = torch.arange(10).view(1, -1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".self_attn." in name}
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    stock = AutoModelForCausalLM.from_pretrained(f"{folder}/stock", tp_plan="auto")
    try:
        hf_synthesizer.patch_model(stock, "random")
        refusal = ""
    except UnsupportedModelError as error:
        refusal = str(error)
    if dist.get_rank() == 0:
        result = {"loss": loss.detach(), "gradients": gradients, "generated": generated, "refusal": refusal}
        torch.save(result, f"{folder}/result.pt")
    leave_together()


if __name__ == "__main__":
    main(sys.argv[1])
