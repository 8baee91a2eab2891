"""For a model that is trained: what does not change any more is computed once."""
