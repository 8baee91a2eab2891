"""How models are told which language to read and which to write."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_synthesizer.errors import InvalidConfigError

logger = logging.get_logger(__name__)

PREFIXED = ("t5", "mt5", "umt5")
"""Model types that take the task from the text itself."""


def speak(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, languages: tuple[str, str] | None, prefix: str
) -> None:
    """Say what is translated into what, in place.

    mBART, mBART-50, M2M100 and NLLB have a token for each language. Where a target starts with it, it is forced to be the first that
    is generated; where it stands at the end (mBART), the model moves it to the front, and generation starts from it. T5 takes the prefix;
    Marian knows one pair and is told nothing.

    Args:
        model: an encoder-decoder.
        tokenizer: its tokenizer.
        languages: source and target as the tokenizer names them (`de_DE`); None where nothing is translated.
        prefix: what stands before each source.

    Raises:
        InvalidConfigError: for a language that the tokenizer has no token for.
    """
    if model.config.model_type in PREFIXED and not prefix:
        logger.warning(
            "This model takes its task from the text: without --source_prefix (such as 'translate German to English: ') a "
            "pretrained one does not know what to do."
        )
    speaker: Any = tokenizer
    if languages is None or not hasattr(speaker, "src_lang"):
        return
    source, target = languages
    for language in languages:
        if _token(speaker, language) == speaker.unk_token_id:
            raise InvalidConfigError(
                f"{type(speaker).__name__} has no token for the language {language!r}; it names languages as "
                f"{', '.join(_some(speaker))} do."
            )
    speaker.src_lang, speaker.tgt_lang = source, target
    token, settings = _token(speaker, target), model.generation_config
    if speaker(text_target="a")["input_ids"][0] == token:
        settings.forced_bos_token_id = token
    else:
        settings.forced_bos_token_id = None
        settings.decoder_start_token_id = model.config.decoder_start_token_id = token


def _token(tokenizer: Any, language: str) -> int:
    ids = getattr(tokenizer, "lang_code_to_id", None)
    return ids.get(language, tokenizer.unk_token_id) if ids else tokenizer.convert_tokens_to_ids(language)


def _some(tokenizer: Any) -> list[str]:
    known = getattr(tokenizer, "lang_code_to_id", None) or tokenizer.all_special_tokens
    return list(known)[:4]
