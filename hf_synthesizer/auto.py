"""Where the shim in every saved checkpoint asks for its classes; this name stays, for checkpoints outlive versions."""

from .models.registration import remote_class

__all__ = ["remote_class"]
