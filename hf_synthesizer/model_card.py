"""`attach_model_card`, for Trainer's own pushes: the import path that the documentation gives."""

from .checkpoints.trainer_model_card import attach_model_card

__all__ = ["attach_model_card"]
