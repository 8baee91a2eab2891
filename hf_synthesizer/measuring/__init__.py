"""The costs of a model, its speed on this machine, and whether this machine computes correctly."""
