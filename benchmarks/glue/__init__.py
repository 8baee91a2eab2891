"""GLUE with stock and synthesized attention."""
