"""Tiny models with a tokenizer, and tiny text, for the tests of the examples of translation, summarisation, language modelling
and dialogue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

from tests.helpers.models import bert_config, t5_config

GERMAN = ["ein", "der", "mann", "hund", "ball", "spielt", "sieht", "haus"]
ENGLISH = ["a", "the", "man", "dog", "ball", "plays", "sees", "house"]
SPECIAL = ["<pad>", "</s>", "<unk>", "<mask>", "<s>"]
VOCABULARY = [*SPECIAL, *dict.fromkeys([*GERMAN, *ENGLISH, ".", "?"])]
SMALL: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
SMALL |= {"init_std": 0.5}  # so that heads look at something


def tokenizer() -> PreTrainedTokenizerFast:
    """Words, and `</s>` at the end of each text."""
    fast = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=fast, **names)


def build(kind: str) -> PreTrainedModel:
    """A tiny model of the kind, for the tokenizer above."""
    size = len(VOCABULARY)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "bos_token_id": 4}
    torch.manual_seed(0)
    if kind == "t5":
        return T5ForConditionalGeneration(t5_config(vocab_size=size))
    if kind == "marian":
        return MarianMTModel(MarianConfig(vocab_size=size, **SMALL, **ends, forced_eos_token_id=1))
    if kind == "bart":
        return BartForConditionalGeneration(BartConfig(vocab_size=size, **SMALL, **ends, forced_eos_token_id=1))
    if kind.startswith("mbart"):
        return MBartForConditionalGeneration(
            MBartConfig(vocab_size=len(mbart_tokenizer(MBartTokenizer)), **SMALL, decoder_start_token_id=2)
        )
    if kind == "bert":
        return BertForMaskedLM(bert_config(vocab_size=size, max_position_embeddings=32))
    if kind == "gpt2":
        settings = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
        return GPT2LMHeadModel(GPT2Config(vocab_size=size, **settings, bos_token_id=4, eos_token_id=1))
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
    shape |= {"initializer_range": 0.5}  # so that heads look at something
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=size, **shape, **heads, pad_token_id=0, eos_token_id=1))


def mbart_tokenizer(kind: type) -> PreTrainedTokenizerBase:
    """mBART's own, or mBART-50's, with all their languages and two dozen words."""
    words = [(f"▁{word}", -2.0) for word in VOCABULARY[len(SPECIAL) :]]
    return kind(vocab=[("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *words])


def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """The tokenizer that goes with the kind of model."""
    known = {"mbart": MBartTokenizer, "mbart50": MBart50Tokenizer}
    return mbart_tokenizer(known[kind]) if kind in known else tokenizer()


def write_model(kind: str, folder: Path) -> Path:
    """The model and its tokenizer."""
    build(kind).save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int, words: list[str] = ENGLISH) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(words, size=generator.integers(3, 7))) for _ in range(count)]


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Sentences, and the same word by word in the other language."""
    german = sentences(count, seed, GERMAN)
    words = dict(zip(GERMAN, ENGLISH, strict=True))
    return [{"de": text, "en": " ".join(words[word] for word in text.split())} for text in german]


def write_parallel(folder: Path, sizes: dict[str, int] | None = None) -> Path:
    """Two files a split, one a language, as Multi30k has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((sizes or {"train": 16, "val": 7, "test": 5}).items()):
        rows = pairs(count, seed)
        for language in ("de", "en"):
            (folder / f"tiny.{split}.{language}").write_text("".join(row[language] + "\n" for row in rows))
    return folder


def write_json(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_text(path: Path, count: int, seed: int) -> Path:
    """One sentence a line."""
    path.write_text("".join(text + "\n" for text in sentences(count, seed)))
    return path


def write_paper_data(folder: Path) -> None:
    """Multi30k, WikiText-2 and DialogSum as benchmarks/paper/scores.py looks for them, in a few rows."""
    for name in ("mt", "lm", "summ"):
        (folder / name).mkdir()
    for split, count in {"train": 20, "test_2016_flickr": 6}.items():
        rows = pairs(count, 0)
        for language in ("de", "en"):
            path = folder / "mt" / f"multi30k.{split}.{language}"
            path.write_text("".join(row[language] + "\n" for row in rows))
    for split in ("train", "test"):
        write_text(folder / "lm" / f"wikitext-2-raw.{split}.txt", 80, 0)
        texts = sentences(6, 1, GERMAN)
        names = ("summary",) if split == "train" else ("summary1", "summary2", "summary3")
        dialogues = [{"dialogue": text, **dict.fromkeys(names, text)} for text in texts]
        write_json(folder / "summ" / f"dialogsum.{'dev' if split == 'train' else split}.jsonl", dialogues)
