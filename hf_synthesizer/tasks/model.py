"""The model and its tokenizer, as the flags of the examples name them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import InvalidConfigError

logger = logging.get_logger(__name__)


@dataclass
class ModelArguments:
    """Which model, and from where."""

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a folder; stock, or patched and saved."})
    config_name: str | None = field(default=None, metadata={"help": "A config, if not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer, if not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})
    model_revision: str = field(default="main", metadata={"help": "A branch, tag or commit of the Hub."})
    token: str | None = field(default=None, metadata={"help": "A token of the Hub, if not the stored one."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that the repository holds."})

    def download_options(self) -> dict[str, Any]:
        """What each `from_pretrained` is called with."""
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "token": self.token,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass
class TextModelArguments(ModelArguments):
    """Which model, from weights or from scratch."""

    model_name_or_path: str = field(
        default="", metadata={"help": "A model of the Hub or a folder; without one the model starts from scratch."}
    )
    model_type: str | None = field(default=None, metadata={"help": "From scratch: a model type, such as gpt2."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "From scratch: settings of the config, such as n_embd=10,n_layer=2."}
    )


def load_tokenizer(arguments: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer.

    Raises:
        InvalidConfigError: where none is named.
    """
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if not name:
        raise InvalidConfigError("A model from scratch has no tokenizer of its own: name --tokenizer_name.")
    return AutoTokenizer.from_pretrained(name, **arguments.download_options())


def load_text_model(arguments: TextModelArguments, auto_class: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model with its head: with its weights, or from scratch; its embeddings hold whatever the tokenizer has.

    Raises:
        InvalidConfigError: for arguments that contradict each other, and settings that the config has not.
    """
    options = arguments.download_options()
    name = arguments.config_name or arguments.model_name_or_path
    if name:
        config: Any = AutoConfig.from_pretrained(name, **options)
    elif arguments.model_type is not None and arguments.model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[arguments.model_type]()
    else:
        raise InvalidConfigError(
            f"Name a model: --model_name_or_path; or from scratch --config_name, or a --model_type that Transformers knows "
            f"(got {arguments.model_type})."
        )
    if arguments.model_name_or_path:
        if arguments.config_overrides or arguments.model_type:
            raise InvalidConfigError(
                "--config_overrides and --model_type are for a model from scratch, without weights."
            )
        model = auto_class.from_pretrained(arguments.model_name_or_path, config=config, **options)
    else:
        if arguments.config_overrides:
            try:
                config.update_from_string(arguments.config_overrides)
            except (ValueError, TypeError) as error:
                raise InvalidConfigError(f"--config_overrides {arguments.config_overrides}: {error}.") from error
        model = auto_class.from_config(config)
        logger.warning(f"A {config.model_type} from scratch: {model.num_parameters() / 1e6:.1f} M parameters.")
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    return model


def load_teacher(path: str | None, auto_class: Any, device: torch.device) -> PreTrainedModel | None:
    """The teacher that a path names, if one does."""
    return auto_class.from_pretrained(path).to(device) if path else None


def require_positions(model: PreTrainedModel, length: int, flag: str) -> None:
    """Whether a model has as many positions as it is to see.

    Raises:
        InvalidConfigError: where it has fewer.
    """
    has = getattr(model.config, "max_position_embeddings", None)
    if has is not None and length > has:
        raise InvalidConfigError(f"{flag} {length} is more than the {has} positions that {type(model).__name__} has.")
