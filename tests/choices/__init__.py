"""Variants whose queries choose their keys."""
