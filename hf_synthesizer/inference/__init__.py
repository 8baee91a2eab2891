"""Inference with a trained model: fuse static attention weights, and check lengths before `generate`."""
