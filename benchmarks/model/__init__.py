"""Speed of whole models, of decoding and of the first call."""
