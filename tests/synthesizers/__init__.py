"""What each variant computes: its formula, its laws, its parameters."""
