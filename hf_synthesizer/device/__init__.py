"""What a computation asks of its device: tracing, autocast, reads of small tensors, offloaded weights, matrix products."""
