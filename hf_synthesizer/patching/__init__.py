"""Swapping self-attention in a model: what a user asks for, which layer gets what, the swap itself, and its report."""
