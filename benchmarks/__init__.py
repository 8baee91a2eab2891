"""Benchmarks by subject: `python -m benchmarks.block.attention`. The map is README.md."""
