"""The inputs of `attend`: forms of logits, masks, and positions of tokens."""
