"""What patched models are on disk and on the Hub: own classes, honest loading, the shim, the model card."""
