"""Trainer, accelerate, tensor parallelism and LoRA."""
