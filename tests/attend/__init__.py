"""How logits meet values: every route equals the reference."""
