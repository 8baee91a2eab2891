"""The wheel, the import, and each error of the library."""
