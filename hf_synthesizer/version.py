"""The version of the library, read by `setup.cfg` and written into every patched checkpoint."""

__version__ = "0.1.0"
