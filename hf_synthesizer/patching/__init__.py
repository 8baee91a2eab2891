"""Swaps self-attention in a model: turns the user's request into a plan, carries it out, and undoes it."""
