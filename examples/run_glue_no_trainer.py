#!/usr/bin/env python
"""Convert a pretrained model to Synthesizer attention and fine-tune it on GLUE or SuperGLUE, with Accelerate alone.

    accelerate launch examples/run_glue_no_trainer.py --model_name_or_path bert-base-uncased \\
        --task_name mrpc --variant dense+salience --transfer_steps 900 --output_dir outputs/mrpc

The training loop is written out, so you can read and change it. Three places in `main` are ours: `patch_model`,
`transfer_attention`, and `save_pretrained`. docs/glue.md has the commands for several processes.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from evaluate import Metric
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, SchedulerType, get_scheduler
from transformers.utils import logging

from hf_synthesizer import patch_model, patch_report, transfer_attention
from hf_synthesizer.errors import DataError
from hf_synthesizer.glue.tasks import Task, predictions_of
from shared import glue
from shared.accelerated import load_checkpoint
from shared.command_line import leave_together, parse, run_script
from shared.model import load_tokenizer

logger = logging.get_logger(__name__)


@dataclass
class LoopArguments:
    """The flags of the training loop."""

    output_dir: str = field(default="outputs/glue", metadata={"help": "The folder for the model and its scores."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a training step and process."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of an evaluation step and process."})
    learning_rate: float = field(default=5e-5, metadata={"help": "The highest learning rate."})
    weight_decay: float = field(default=0.01, metadata={"help": "The weight decay; not for biases and layer norms."})
    num_train_epochs: int = field(default=3, metadata={"help": "Passes over the training data."})
    max_train_steps: int | None = field(default=None, metadata={"help": "Steps, instead of passes."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "The number of batches for one step."})
    lr_scheduler_type: SchedulerType = field(default=SchedulerType.LINEAR, metadata={"help": "The shape of the rate."})
    num_warmup_steps: int = field(default=0, metadata={"help": "Steps in which the rate rises."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "The maximum norm of the gradients."})
    seed: int = field(default=42, metadata={"help": "The seed of the head, the order of the rows, and dropout."})
    mixed_precision: str | None = field(
        default=None, metadata={"help": "no, bf16 or fp16. Default: Accelerate's config."}
    )
    checkpointing_steps: str | None = field(
        default=None, metadata={"help": "Save the whole state every so many steps, or after each 'epoch'."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "A saved state (step_100, epoch_0), or 'latest' for the newest."}
    )
    with_tracking: bool = field(default=False, metadata={"help": "Report to trackers."})
    report_to: str = field(default="all", metadata={"help": "Which trackers: tensorboard, wandb, …, or all."})
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the model at the end."})
    hub_model_id: str | None = field(
        default=None, metadata={"help": "The name on the Hub. Default: that of output_dir."}
    )
    hub_token: str | None = field(default=None, metadata={"help": "A token of the Hub, instead of the stored one."})


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script with these arguments, and return the metrics."""
    model_arguments, data_arguments, conversion, loop = parse(
        (glue.ClassifierArguments, glue.DataArguments, glue.ClassifierConversionArguments, LoopArguments),
        sys.argv[1:] if argv is None else argv,
    )
    conversion.require_consistent()
    accelerator = Accelerator(
        # The order of an epoch's rows depends on seed and epoch alone, so a resumed run sees the same order.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=loop.seed),
        gradient_accumulation_steps=loop.gradient_accumulation_steps,
        mixed_precision=loop.mixed_precision,
        project_dir=loop.output_dir,
        log_with=loop.report_to if loop.with_tracking else None,
    )
    set_seed(loop.seed)

    # Rows, as numbers.
    with accelerator.main_process_first():
        task, rows = glue.load_data(data_arguments)
    for split in ("train", *task.validation):
        if split not in rows:
            raise DataError(f"Training and evaluation need the {split} data: name --{split.partition('_')[0]}_file.")
    tokenizer = load_tokenizer(model_arguments)
    with accelerator.main_process_first():
        encoded = {split: glue.tokenize(task, rows[split], tokenizer, data_arguments) for split in rows}
    collate = glue.collator(task, tokenizer, data_arguments)
    order = torch.Generator().manual_seed(loop.seed)
    train_loader = DataLoader(
        encoded["train"], loop.per_device_train_batch_size, shuffle=True, generator=order, collate_fn=collate
    )
    eval_loaders = {
        split: DataLoader(encoded[split], loop.per_device_eval_batch_size, collate_fn=collate)
        for split in task.validation
    }

    # The model is patched, and the stock model teaches the new attention.
    model, teacher = glue.load_student_and_teacher(model_arguments, conversion, task, accelerator.device)
    if conversion.variant is not None:
        stock = copy.deepcopy(model) if teacher is None else teacher
        autocast = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
        text = glue.transfer_text(encoded["train"], conversion, data_arguments, tokenizer, loop.seed)
        batches = conversion.batches(text, collate, loop.seed)
        with accelerator.main_process_first():  # the other processes load the result of the first
            variant, layers = conversion.choose(stock, batches, data_arguments.max_length, autocast)
            patch_model(model, variant, layers=layers, max_length=data_arguments.max_length, **conversion.options)
            logger.warning(f"{patch_report(model)}")
            if conversion.transfers:
                report = transfer_attention(
                    model,
                    stock,
                    batches,
                    method=conversion.transfer_method,
                    steps=conversion.stages,
                    autocast=autocast,
                    checkpoint_dir=Path(loop.output_dir) / "transfer",
                )
                logger.warning(f"Transfer:\n{report}")
        del stock, teacher  # to free their memory for the training

    # From here on everything is as without hf_synthesizer.
    set_seed(loop.seed)
    if loop.with_tracking:
        settings = asdict(model_arguments) | asdict(data_arguments) | asdict(conversion) | asdict(loop)
        plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
        accelerator.init_trackers("glue", plain)
    metric = glue.load_metric(task, network=not data_arguments.local_metrics)
    trained, metrics = train(accelerator, model, train_loader, eval_loaders, task, metric, loop)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(trained)  # all processes take part, because weights may be sharded
    if accelerator.is_main_process:
        # The config.json says what was swapped. AutoModel loads the model after `import hf_synthesizer`.
        unwrapped = accelerator.unwrap_model(trained)
        unwrapped.save_pretrained(loop.output_dir, state_dict=state)
        tokenizer.save_pretrained(loop.output_dir)
        (Path(loop.output_dir) / "all_results.json").write_text(json.dumps(metrics, indent=2))
        if loop.push_to_hub:
            name = loop.hub_model_id or Path(loop.output_dir).name
            for thing in (unwrapped, tokenizer):
                thing.push_to_hub(name, token=loop.hub_token)
    leave_together()
    accelerator.end_training()
    return metrics


def train(
    accelerator: Accelerator,
    model: PreTrainedModel,
    train_loader: DataLoader,
    eval_loaders: dict[str, DataLoader],
    task: Task,
    metric: Metric,
    loop: LoopArguments,
) -> tuple[torch.nn.Module, dict[str, float]]:
    """Train, evaluate after every epoch, save, and resume. Returns the prepared model and its last metrics."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": loop.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=loop.learning_rate,
    )
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    eval_loaders = {split: accelerator.prepare(data) for split, data in eval_loaders.items()}
    steps_an_epoch = math.ceil(len(train_loader) / loop.gradient_accumulation_steps)
    total = loop.max_train_steps or loop.num_train_epochs * steps_an_epoch
    epochs = math.ceil(total / steps_an_epoch)
    processes = accelerator.num_processes  # a prepared scheduler steps once for each process
    scheduler = get_scheduler(loop.lr_scheduler_type, optimizer, loop.num_warmup_steps * processes, total * processes)
    scheduler = accelerator.prepare(scheduler)
    done = load_checkpoint(accelerator, loop.resume_from_checkpoint, loop.output_dir, steps_an_epoch)
    rows = loop.per_device_train_batch_size * loop.gradient_accumulation_steps
    accelerator.print(f"{total} steps of {rows} rows in each of {processes} processes")
    bar = tqdm(total=total, initial=done, disable=None if accelerator.is_local_main_process else True)
    metrics: dict[str, float] = {}
    for epoch in range(done // steps_an_epoch, epochs):
        model.train()
        train_loader.set_epoch(epoch)
        skipped = (done - epoch * steps_an_epoch) * loop.gradient_accumulation_steps
        batches = accelerator.skip_first_batches(train_loader, skipped) if skipped else train_loader
        loss_sum, counted = torch.zeros((), device=accelerator.device), 0
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                loss_sum += loss.detach().float()
                counted += 1
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), loop.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            bar.update()
            every = loop.checkpointing_steps or ""
            if every.isdigit() and not done % int(every):
                accelerator.save_state(str(Path(loop.output_dir) / f"step_{done}"))
            if done >= total:
                break
        metrics = evaluate(accelerator, model, eval_loaders, task, metric)
        metrics["train_loss"] = accelerator.reduce(loss_sum / max(counted, 1), "mean").item()
        accelerator.print(f"epoch {epoch}: {json.dumps(metrics)}")
        if loop.with_tracking:
            accelerator.log({**metrics, "epoch": epoch}, step=done)
        if loop.checkpointing_steps == "epoch":
            accelerator.save_state(str(Path(loop.output_dir) / f"epoch_{epoch}"))
    bar.close()
    if not metrics:  # resumed after the last step
        metrics = evaluate(accelerator, model, eval_loaders, task, metric)
    return model, metrics


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, loaders: dict[str, DataLoader], task: Task, metric: Metric
) -> dict[str, float]:
    """The official metrics on whole validation sets over all processes. Rows that fill up the last batch count once."""
    model.eval()
    metrics = {}
    for split, data in loaders.items():
        suffix = split.removeprefix("validation")  # MNLI has two validation sets
        found, wanted = [], []
        for batch in data:
            outputs = model(**batch).logits.float()
            outputs, labels = accelerator.gather_for_metrics((outputs, batch["labels"]))
            found.append(outputs.cpu())
            wanted.append(labels.cpu())
        predictions = predictions_of(task, torch.cat(found).numpy())
        computed = metric.compute(predictions=predictions, references=torch.cat(wanted).numpy())
        metrics |= {f"eval{suffix}_{name}": value for name, value in computed.items()}
        metrics[f"eval{suffix}_score"] = task.score(computed)
    return metrics


if __name__ == "__main__":
    run_script(main)
