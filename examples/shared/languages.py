"""Tell a model which language it reads and which it writes."""

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
    """Set the languages of a model and its tokenizer in place.

    mBART, mBART-50, M2M100 and NLLB have a token for each language. If a target starts with this token, generation is forced to
    start with it. If it stands at the end (mBART), the model moves it to the front, and generation starts from it. T5 reads the
    prefix. Marian knows one pair of languages and needs nothing.

    Args:
        model: an encoder-decoder.
        tokenizer: its tokenizer.
        languages: source and target by their names in the tokenizer (`de_DE`). None if nothing is translated.
        prefix: the text before each source.

    Raises:
        InvalidConfigError: for a language without a token.
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
