"""Load the model and the tokenizer that the flags name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_synthesizer.checkpoints.fresh_heads import remember_fresh
from hf_synthesizer.errors import InvalidConfigError, loading
from hf_synthesizer.layers.lengths import max_length_of

logger = logging.get_logger(__name__)


@dataclass
class ModelArguments:
    """The flags of the model."""

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a folder; stock, or patched and saved."})
    config_name: str | None = field(default=None, metadata={"help": "A config, if not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer, if not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "The folder for downloads."})
    model_revision: str = field(default="main", metadata={"help": "A branch, tag or commit of the Hub."})
    token: str | None = field(default=None, metadata={"help": "A token of the Hub, instead of the stored one."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that the repository holds."})
    dtype: str = field(
        default="float32",
        metadata={
            "help": "The dtype of the weights. auto: as in the checkpoint. Mixed precision is --bf16.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
            "aliases": ["--torch_dtype"],
        },
    )

    def download_options(self) -> dict[str, Any]:
        """The arguments for each `from_pretrained` of a config, a tokenizer or a model."""
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "token": self.token,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass
class TextModelArguments(ModelArguments):
    """The flags of the model, with weights or from scratch."""

    model_name_or_path: str = field(
        default="", metadata={"help": "A model of the Hub or a folder; without one the model starts from scratch."}
    )
    model_type: str | None = field(default=None, metadata={"help": "From scratch: a model type, such as gpt2."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "From scratch: settings of the config, such as n_embd=10,n_layer=2."}
    )


def load_tokenizer(arguments: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer.

    Raises:
        InvalidConfigError: if no flag names one, or if it cannot be loaded.
    """
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if not name:
        raise InvalidConfigError("A model from scratch has no tokenizer of its own: name --tokenizer_name.")
    with loading("tokenizer", name):
        return AutoTokenizer.from_pretrained(name, **arguments.download_options())


def load_text_model(arguments: TextModelArguments, auto_class: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load the model with its head, or build it from scratch. Its embeddings grow to the size of the tokenizer.

    Raises:
        InvalidConfigError: for arguments that contradict each other, settings that the config does not have, or a model that
            cannot be loaded or has another kind of head.
    """
    options, info = arguments.download_options(), None
    name = arguments.config_name or arguments.model_name_or_path
    if name:
        with loading("model", name):
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
        require_kind(config, auto_class, name)
        with loading("model", arguments.model_name_or_path):
            model, info = auto_class.from_pretrained(
                arguments.model_name_or_path, config=config, dtype=arguments.dtype, output_loading_info=True, **options
            )
    else:
        require_kind(config, auto_class, name or str(arguments.model_type))
        for end in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, end, getattr(tokenizer, end))
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = tokenizer.pad_token_id  # T5's
        try:
            config.update_from_string(arguments.config_overrides or "")
            model = auto_class.from_config(config, dtype=None if arguments.dtype == "auto" else arguments.dtype)
        except (ValueError, TypeError) as error:
            raise InvalidConfigError(f"--config_overrides {arguments.config_overrides}: {error}.") from error
        logger.warning(f"A {config.model_type} from scratch: {model.num_parameters() / 1e6:.1f} M parameters.")
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    if info is not None:
        remember_fresh(model, info)
    return model


SCRIPTS: dict[Any, str] = {
    AutoModelForCausalLM: "run_clm.py and run_dialogue.py",
    AutoModelForMaskedLM: "run_mlm.py",
    AutoModelForSeq2SeqLM: "run_translation.py and run_summarization.py",
}
"""Which examples train which kind of model."""


def require_kind(config: Any, auto_class: Any, name: str) -> None:
    """Check that a model has the head that a task needs.

    Raises:
        InvalidConfigError: if not. The message names the examples for such a model.
    """
    kind = config.model_type
    fits = [one for one in SCRIPTS if kind in one._model_mapping._model_mapping]  # by model type, without an import
    if fits and auto_class not in fits:
        others = ", or ".join(SCRIPTS[one] for one in fits)
        raise InvalidConfigError(f"{name} is a {kind}, which has no such head: {others} are for it.")


@torch.no_grad()
def require_causal(model: PreTrainedModel) -> None:
    """Check that a language model does not see the tokens that it predicts. For two texts that differ in their last token, it must
    predict the same before that token.

    Raises:
        InvalidConfigError: for an encoder with the head of a language model.
    """
    training = model.training
    texts = torch.tensor([[0, 1, 1], [0, 1, 2]], device=model.device)
    first, second = model.eval()(input_ids=texts, attention_mask=torch.ones_like(texts)).logits[:, 0].float()
    model.train(training)
    if (first - second).abs().max() > 1e-4 * first.abs().max():
        raise InvalidConfigError(
            f"{type(model).__name__} sees the tokens that it is to predict: it is an encoder, for run_mlm.py. To make a "
            f"decoder of it, set is_decoder in its config."
        )


def load_teacher(
    path: str | None, auto_class: Any, device: torch.device, arguments: ModelArguments
) -> PreTrainedModel | None:
    """Load the teacher in the student's precision. None without a path.

    Raises:
        InvalidConfigError: for a model that cannot be loaded, or has another kind of head.
    """
    if not path:
        return None
    with loading("teacher", path):
        config = AutoConfig.from_pretrained(path)
    require_kind(config, auto_class, path)
    with loading("teacher", path):
        teacher, info = auto_class.from_pretrained(
            path, config=config, dtype=arguments.dtype, output_loading_info=True
        )
    remember_fresh(teacher, info)
    return teacher.to(device)


def positions_of(model: PreTrainedModel) -> int | None:
    """The maximum number of tokens of a model: the positions of its embeddings (without those that RoBERTa leaves out) or of its
    synthesizers. None if there is no maximum."""
    known = [length for length in [max_length_of(model)] if length]
    own = getattr(model.config, "max_position_embeddings", None)
    if own is not None:
        tables = (part for name, part in model.named_modules() if name.endswith("embeddings.position_embeddings"))
        before = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
        known.append(own - max(before, default=0))
    return min(known, default=None)


def require_positions(model: PreTrainedModel, length: int, flag: str) -> None:
    """Check that a model has enough positions.

    Raises:
        InvalidConfigError: if not.
    """
    has = positions_of(model)
    if has is not None and length > has:
        raise InvalidConfigError(f"{flag} {length} is more than the {has} positions that {type(model).__name__} has.")
