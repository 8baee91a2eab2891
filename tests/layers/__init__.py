"""The layers of stock forwards: signatures, decoding, caches, windows."""
