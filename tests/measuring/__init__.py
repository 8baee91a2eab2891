"""Costs on paper, and times of a layer."""
