"""What makes the documentation: `python -m docs.compatibility`, and the extensions of Sphinx in `extensions/`."""
