"""What Transformers asks a config for its model type, it is answered as of the stock model; a checkpoint says its own."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutomaticSpeechRecognitionPipeline,
    PreTrainedConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_synthesizer import patch_model, unpatch_model
from hf_synthesizer.layers.finding.model_types import served_types
from hf_synthesizer.models.classes import config_class
from hf_synthesizer.models.registration import INPUTS
from tests.helpers.models import build
from tests.helpers.word_tokenizer import tokenizer

SERVED = sorted(model_type for model_type in served_types() if model_type in CONFIG_MAPPING)
SAMPLE = ("bert", "clip", "gpt2", "layoutlmv3", "llama", "llava", "mpnet", "t5", "vit", "vivit", "wav2vec2", "whisper")


def whisper() -> WhisperForConditionalGeneration:
    model = build("WhisperForConditionalGeneration", max_target_positions=40)
    settings = {"no_timestamps_token_id": 50, "prev_sot_token_id": 51, "is_multilingual": False}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def transcribed(model: WhisperForConditionalGeneration) -> list[int]:
    """Three windows of sound, each with the text of the one before and a prompt."""
    torch.manual_seed(3)
    frames = 3 * 2 * model.config.max_source_positions
    prompt = {"prompt_ids": torch.tensor([51, 7, 8, 9]), "condition_on_prev_tokens": True, "return_timestamps": True}
    sound, mask = torch.randn(1, 4, frames), torch.ones(1, frames, dtype=torch.long)
    return model.generate(sound, attention_mask=mask, **prompt, max_new_tokens=8, temperature=0.0)[0].tolist()


def test_whisper_with_a_prompt_and_what_was_said_before_transcribes_as_before() -> None:
    model = whisper()
    before = transcribed(model)
    assert transcribed(patch_model(model, "dot_product")) == before


def test_the_pipeline_of_speech_knows_a_patched_whisper() -> None:
    model = patch_model(whisper(), "random")
    pipe = AutomaticSpeechRecognitionPipeline(
        model=model, tokenizer=tokenizer(), feature_extractor=WhisperFeatureExtractor(feature_size=4)
    )
    assert pipe.type == "seq2seq_whisper"


@pytest.mark.parametrize(
    ("head", "auto_class"),
    [
        ("ViTForImageClassification", AutoImageProcessor),
        ("Wav2Vec2ForSequenceClassification", AutoFeatureExtractor),
        ("WhisperForConditionalGeneration", AutoFeatureExtractor),
    ],
)
def test_the_processor_of_a_patched_model_is_found_by_its_config(tmp_path: Path, head: str, auto_class: Any) -> None:
    model = build(head)
    for folder in (tmp_path / "stock", tmp_path / "patched"):
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text("{}")  # names no class, as those of the first releases
        if folder.name == "stock":
            patch_model(model, "random")
    stock, patched = (auto_class.from_pretrained(tmp_path / name) for name in ("stock", "patched"))
    assert type(patched) is type(stock)


def test_the_file_has_a_model_type_of_its_own_and_the_object_the_stock_one(tmp_path: Path) -> None:
    model = build("BertForSequenceClassification")
    stock = model.config
    patch_model(model, "random").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "synthesizer_bert"
    loaded = AutoConfig.from_pretrained(tmp_path)
    copies = (model.config, loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)))
    for config in copies:
        assert config.model_type == "bert" and type(config).model_type == "synthesizer_bert"
        assert config.to_dict()["model_type"] == "synthesizer_bert"
        assert json.loads(config.to_json_string())["model_type"] == "synthesizer_bert"
    assert unpatch_model(model).config is stock and stock.to_dict()["model_type"] == "bert"


def test_a_patched_part_of_a_composite_keeps_its_type_in_the_file(tmp_path: Path) -> None:
    encoder, decoder = patch_model(build("BertModel"), "random"), build("BertLMHeadModel", add_cross_attention=True)
    whole = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    assert whole.config.encoder.model_type == "bert"
    whole.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["encoder"]["model_type"] == "synthesizer_bert"
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path)
    assert type(loaded.encoder).__name__ == "SynthesizerBertModel"


def modules() -> Iterator[Any]:
    """Transformers' own modules in which something may be looked up by a model's type."""
    importlib.import_module("transformers.integrations.awq")
    for name in ("models.auto", "pipelines", "generation", "loss"):
        package = importlib.import_module(f"transformers.{name}")
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            try:
                yield importlib.import_module(found.name)
            except ImportError:  # what it integrates is not installed
                continue
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("transformers.integrations.", "transformers.models.auto.")) or (
            name.startswith("transformers.") and name.count(".") == 1
        ):
            yield module


@cache
def by_model_type() -> dict[str, Mapping[str, Any]]:
    """The mappings of Transformers whose keys are model types."""
    found: dict[str, Mapping[str, Any]] = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, Mapping) and not isinstance(value, _LazyAutoMapping) and name.upper() == name:
                keys = [key for key in value if isinstance(key, str)]
                if len(keys) >= 2 and sum(key in CONFIG_MAPPING for key in keys) > len(keys) / 2:
                    found[f"{module.__name__}.{name}"] = value
    return found


@cache
def by_config() -> dict[str, _LazyAutoMapping]:
    """The mappings of Transformers whose keys are config classes."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, _LazyAutoMapping)
    }


def hold(model_type: str) -> None:
    """Every mapping answers for the patched config as for the stock one."""
    stock = CONFIG_MAPPING[model_type]
    own = config_class(stock)
    config = own.__new__(own)  # no value of it is asked for
    assert issubclass(own, PreTrainedConfig) and config.model_type == stock.model_type
    for name, mapping in by_model_type().items():
        assert mapping.get(config.model_type) is mapping.get(stock.model_type), name
    for name, mapping in by_config().items():
        if any(mapping is one for one in INPUTS):
            known, expected = mapping._reverse_config_mapping.get(own.__name__), mapping.get(stock, None)
            assert (known is None) == (expected is None), name
            assert known is None or mapping[own] == expected, name
        elif own in mapping:
            made, before = mapping[own], mapping[stock]
            first = before[0] if isinstance(before, (tuple, list)) else before
            assert issubclass(made, first) and made.__name__ == f"Synthesizer{first.__name__}", name


def test_the_mappings_that_are_held_against_the_rule_are_there() -> None:
    names = " ".join([*by_model_type(), *by_config()])
    for name in (
        "IMAGE_PROCESSOR_MAPPING_NAMES",
        "FEATURE_EXTRACTOR_MAPPING",
        "AWQ_SCALES_MAPPINGS",
        "MODEL_FOR_CTC_MAPPING",
    ):
        assert name in names
    assert all(any(mapping is one for one in by_config().values()) for mapping in INPUTS)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_what_is_looked_up_by_model_type_is_what_the_stock_model_has(model_type: str) -> None:
    hold(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SERVED)
def test_what_is_looked_up_by_model_type_is_what_every_stock_model_has(model_type: str) -> None:
    hold(model_type)
