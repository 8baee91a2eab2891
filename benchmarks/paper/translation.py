"""Translation from German to English by Marian, from scratch."""

from __future__ import annotations

from dataclasses import replace

from transformers import (
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)

from benchmarks.paper.task import Size
from benchmarks.paper.text_to_text import TextToText
from examples.shared.files import read_parallel
from examples.shared.generated import translation_scores


class Translation(TextToText):
    """Multi30k, German to English; BLEU on test 2016."""

    score = "bleu"
    size = Size(inner=256, batch_size=16, rows=15000, test_rows=500)

    def prepare(self) -> None:
        files = {"train": "multi30k.train", "test": "multi30k.test_2016_flickr"}
        pairs = {split: read_parallel(self.data / "mt" / name, ("de", "en"))[:] for split, name in files.items()}
        sides = {s: [[row[side] for row in pairs[s]["translation"]] for side in ("de", "en")] for s in files}
        self.tokenizer = self.make_tokenizer("multi30k", [text for side in sides["train"] for text in side])
        read = {split: ([self.prefix + text for text in de], en) for split, (de, en) in sides.items()}
        self.rows, self.test = (self.encode(*read[split]) for split in files)
        self.test = self.test[: self.size.test_rows]
        self.wanted = sides["test"][1][: self.size.test_rows]

    def build(self) -> PreTrainedModel:
        size = self.size
        half = {"layers": size.layers, "attention_heads": size.heads, "ffn_dim": size.inner}
        return MarianMTModel(
            MarianConfig(
                vocab_size=size.vocabulary,
                d_model=size.width,
                max_position_embeddings=size.max_length,
                attention_dropout=0.0,
                dropout=0.0,
                activation_function="relu",
                scale_embedding=True,  # else positions drown the words
                init_std=size.width**-0.5,
                pad_token_id=0,
                eos_token_id=1,
                forced_eos_token_id=1,
                decoder_start_token_id=0,
                **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in half.items()},
            )
        )

    def judge(self, model: PreTrainedModel) -> dict[str, float]:
        return translation_scores(self.generate(model, self.test), self.wanted)


class LongTranslation(Translation):
    """The same, on all pairs, three times each."""

    size = replace(Translation.size, rows=None, epochs=3)
