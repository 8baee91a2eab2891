"""What a computation needs to know of the device that it runs on: tracing, reads, matrix products."""
