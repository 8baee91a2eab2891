"""What a layer hands to `attend`: the forms of logits, masks, and the positions of tokens."""
