#!/usr/bin/env python
"""Convert a pretrained decoder to Synthesizer attention and train it to reply, with Trainer.

    python examples/run_dialogue.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name knkarthick/dialogsum \\
        --variant random+dot_product --do_train --do_eval --output_dir outputs/dialogue

History and reply are one sequence, and the reply is what is learnt. It is judged by its perplexity, and by what the model replies
itself: BLEU-1 and ROUGE-L.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial

from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

from hf_synthesizer.tasks.conversion import ConversionArguments, require_weights
from hf_synthesizer.tasks.files import load_splits, require_splits
from hf_synthesizer.tasks.generated import reply_scores
from hf_synthesizer.tasks.model import (
    TextModelArguments,
    load_teacher,
    load_text_model,
    load_tokenizer,
    require_causal,
    require_positions,
)
from hf_synthesizer.tasks.perplexity import perplexity, summing
from hf_synthesizer.tasks.replies import DialogueArguments, encode, exchanges_of, generate_replies
from hf_synthesizer.tasks.training import (
    convert_before_training,
    evaluate,
    parse,
    run_script,
    train,
    transfer_batches,
    write_lines,
)


@dataclass
class DialogueTrainingArguments(TrainingArguments):
    """Trainer's own, and how replies are generated."""

    generation_num_beams: int = field(
        default=1, metadata={"help": "How many beams replies are searched with.", "aliases": ["--num_beams"]}
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    model_arguments, data, conversion, training = parse(
        (TextModelArguments, DialogueArguments, ConversionArguments, DialogueTrainingArguments),
        sys.argv[1:] if argv is None else argv,
    )
    require_weights(model_arguments.model_name_or_path, conversion)
    set_seed(training.seed)
    splits = load_splits(data)
    require_splits(splits, training)
    rows = {split: exchanges_of(split, found, data) for split, found in splits.items()}
    tokenizer = load_tokenizer(model_arguments)
    model = load_text_model(model_arguments, AutoModelForCausalLM, tokenizer).to(training.device)
    require_causal(model)
    require_positions(model, data.max_length, "--max_length")
    encoded = {split: encode(found, tokenizer, data) for split, found in rows.items()}
    collate = DataCollatorForSeq2Seq(tokenizer)
    convert_before_training(
        model,
        conversion,
        training,
        max_length=data.max_length,
        dataloader=transfer_batches(
            lambda: encoded.get("train", encoded[next(iter(encoded))]).remove_columns(["history", "reply"]),
            conversion,
            collate,
            training.seed,
        ),
        teacher=load_teacher(conversion.teacher, AutoModelForCausalLM, training.device, model_arguments),
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encoded.get("train") if training.do_train else None,
        eval_dataset=encoded.get("validation"),
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=summing(causal=True),
        processing_class=tokenizer,
        data_collator=collate,
    )
    reply = partial(
        generate_replies,
        trainer.accelerator,
        model,
        tokenizer=tokenizer,
        max_reply_length=data.max_reply_length,
        batch_size=training.per_device_eval_batch_size,
        num_beams=training.generation_num_beams,
        do_sample=False,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer)
    for split, prefix, wanted in (("validation", "eval", training.do_eval), ("test", "predict", training.do_predict)):
        if not wanted:
            continue
        replies = reply(encoded[split])
        scores = reply_scores(replies, encoded[split]["reply"])
        also = {f"{prefix}_{name}": value for name, value in scores.items()}
        metrics |= evaluate(trainer, encoded[split], prefix, also)
        write_lines(trainer, f"replies_{split}.txt", replies)
    if training.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_arguments.model_name_or_path or None, tasks="text-generation")
    return metrics


if __name__ == "__main__":
    run_script(main)
