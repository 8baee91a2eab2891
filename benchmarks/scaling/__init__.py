"""Accelerators and several processes: costs on paper, resources of the Triton kernels, distributed training."""
