"""The model types of patched checkpoints, as `AutoConfig` looks them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..upstream.transformers_names import wrap_added_configs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL_TYPE_PREFIX = "synthesizer_"


class SynthesizerConfigs(dict[str, Any]):
    """What Transformers' mapping of model types holds beyond its own: a "synthesizer_xxx" for each of them.

    The config class, and with it the Auto classes' entries, is made when a checkpoint first asks for it, so that to import
    this package imports no modeling file.
    """

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._stock_type(key) is not None

    def __missing__(self, key: str) -> type[PreTrainedConfig]:
        stock = self._stock_type(key)
        if stock is None:
            raise KeyError(key)
        from .classes import config_class

        return config_class(CONFIG_MAPPING[stock])

    @staticmethod
    def _stock_type(key: object) -> str | None:
        if not isinstance(key, str) or not key.startswith(MODEL_TYPE_PREFIX):
            return None
        stock = key.removeprefix(MODEL_TYPE_PREFIX)
        return stock if stock in CONFIG_MAPPING else None


def serve_model_types() -> None:
    """Let `AutoConfig` know the model types of patched checkpoints: once."""
    wrap_added_configs(SynthesizerConfigs)
