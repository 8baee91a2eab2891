"""Speed and memory of one attention block."""
