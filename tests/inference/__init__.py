"""Fusing and export."""
