"""What a model costs, on paper and on this machine, and whether this machine computes it right."""
