"""Finds the attention layers of a model, and for each stock attention class the layer class that serves it."""
