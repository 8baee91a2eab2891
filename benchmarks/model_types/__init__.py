"""Every model type of Transformers, patched and held to the laws of a patched model."""
