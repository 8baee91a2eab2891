#!/usr/bin/env python
"""Convert a pretrained model to Synthesizer attention and fine-tune it on GLUE or SuperGLUE, with Accelerate alone.

    accelerate launch examples/run_glue_no_trainer.py --model_name_or_path bert-base-uncased \\
        --task_name mrpc --variant dense+salience --transfer_steps 900 --output_dir outputs/mrpc

The training loop is spelled out, to be read and changed. docs/glue.md has the lines for several processes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import Dataset, DatasetDict
from evaluate import Metric
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import HfArgumentParser, PreTrainedModel, SchedulerType, get_scheduler
from transformers.utils import logging

from hf_synthesizer.errors import DataError
from hf_synthesizer.glue.conversion import ConversionArguments, load_student_and_teacher, transfer_text
from hf_synthesizer.glue.data import DataArguments, collator, load_data, tokenize
from hf_synthesizer.glue.metrics import load_metric, predictions_of
from hf_synthesizer.glue.model import ModelArguments
from hf_synthesizer.glue.tasks import Task
from hf_synthesizer.glue.variation import Rows
from hf_synthesizer.tasks.conversion import convert
from hf_synthesizer.tasks.model import load_tokenizer
from hf_synthesizer.tasks.training import leave_together, run_script

logger = logging.get_logger(__name__)


@dataclass
class LoopArguments:
    """How the model is trained."""

    output_dir: str = field(default="outputs/glue", metadata={"help": "Where the model and its scores go."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a training step and process."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of an evaluation step and process."})
    learning_rate: float = field(default=5e-5, metadata={"help": "The highest learning rate."})
    weight_decay: float = field(default=0.01, metadata={"help": "Not for biases and layer norms."})
    num_train_epochs: int = field(default=3, metadata={"help": "Passes over the training data."})
    max_train_steps: int | None = field(default=None, metadata={"help": "Steps, instead of passes."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches to one step."})
    lr_scheduler_type: SchedulerType = field(default=SchedulerType.LINEAR, metadata={"help": "The shape of the rate."})
    num_warmup_steps: int = field(default=0, metadata={"help": "Steps in which the rate rises."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Longer gradients are shortened to this."})
    seed: int = field(default=42, metadata={"help": "Of the head, the order of the rows, and dropout."})
    mixed_precision: str | None = field(
        default=None, metadata={"help": "no, bf16 or fp16; Accelerate's config if not."}
    )
    checkpointing_steps: str | None = field(
        default=None, metadata={"help": "Save the whole state every so many steps, or at each 'epoch'."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "A folder saved so (step_100, epoch_0), or 'latest' for the newest one."}
    )
    with_tracking: bool = field(default=False, metadata={"help": "Report to trackers."})
    report_to: str = field(
        default="all", metadata={"help": "Which trackers: tensorboard, wandb, …, or all there are."}
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the model at the end."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Under which name; output_dir's if none."})
    hub_token: str | None = field(default=None, metadata={"help": "A token of the Hub, if not the stored one."})


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what the command line asks for; returns the metrics."""
    parser = HfArgumentParser((ModelArguments, DataArguments, ConversionArguments, LoopArguments))
    model_arguments, data_arguments, conversion, loop = parser.parse_args_into_dataclasses(argv)
    accelerator = Accelerator(
        # The order of an epoch's rows depends on seed and epoch alone, so that a resumed run sees the same.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=loop.seed),
        gradient_accumulation_steps=loop.gradient_accumulation_steps,
        mixed_precision=loop.mixed_precision,
        project_dir=loop.output_dir,
        log_with=loop.report_to if loop.with_tracking else None,
    )
    set_seed(loop.seed)

    with accelerator.main_process_first():
        task, rows = load_data(data_arguments)
    missing = [split for split in ("train", *task.validation) if split not in rows]
    if missing:
        raise DataError(
            f"Training and evaluation need the {missing[0]} data: name --{missing[0].partition('_')[0]}_file."
        )
    tokenizer = load_tokenizer(model_arguments)
    with accelerator.main_process_first():
        encoded = DatasetDict({split: tokenize(task, rows[split], tokenizer, data_arguments) for split in rows})
    collate = collator(task, tokenizer, data_arguments)
    model, teacher = load_student_and_teacher(model_arguments, conversion, task, accelerator.device)

    def loader(data: Dataset | Rows, batch_size: int, shuffle: bool) -> DataLoader:
        generator = torch.Generator().manual_seed(loop.seed) if shuffle else None
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle, generator=generator, collate_fn=collate)

    text = transfer_text(
        encoded["train"],
        conversion,
        data_arguments,
        tokenizer,
        loop.seed,
    )
    with accelerator.main_process_first():  # the other processes load what the first one made
        convert(
            model,
            conversion,
            max_length=data_arguments.max_length,
            dataloader=loader(text, conversion.transfer_batch_size, shuffle=True),
            teacher=teacher,
            autocast=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
            checkpoint_dir=Path(loop.output_dir) / "transfer",
        )
    del teacher  # its memory is free for the training

    set_seed(loop.seed)
    trained = train(
        accelerator,
        model,
        loader(encoded["train"], loop.per_device_train_batch_size, shuffle=True),
        {split: loader(encoded[split], loop.per_device_eval_batch_size, shuffle=False) for split in task.validation},
        task,
        load_metric(task, network=not data_arguments.local_metrics),
        loop,
        {**asdict(model_arguments), **asdict(data_arguments), **asdict(conversion), **asdict(loop)},
    )
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(trained)  # every process takes part where weights are sharded
    if accelerator.is_main_process:
        unwrapped = accelerator.unwrap_model(trained)
        unwrapped.save_pretrained(loop.output_dir, state_dict=state)
        tokenizer.save_pretrained(loop.output_dir)
        if loop.push_to_hub:
            name = loop.hub_model_id or Path(loop.output_dir).name
            for thing in (unwrapped, tokenizer):
                thing.push_to_hub(name, token=loop.hub_token)
    metrics = {}
    if accelerator.is_main_process:
        metrics = json.loads((Path(loop.output_dir) / "all_results.json").read_text())
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
    settings: dict[str, object],
) -> torch.nn.Module:
    """The loop: train, evaluate after every epoch, save, take up again. Returns the prepared model."""
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
    # A prepared scheduler moves once a process, so that it counts as one process alone would.
    scheduler = accelerator.prepare(
        get_scheduler(
            loop.lr_scheduler_type,
            optimizer,
            num_warmup_steps=loop.num_warmup_steps * accelerator.num_processes,
            num_training_steps=total * accelerator.num_processes,
        )
    )
    if loop.with_tracking:
        plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
        accelerator.init_trackers("glue", plain)
    done = load_checkpoint(accelerator, loop, steps_an_epoch)
    rows = loop.per_device_train_batch_size * loop.gradient_accumulation_steps
    accelerator.print(f"{total} steps of {rows} rows in each of {accelerator.num_processes} processes")
    bar = tqdm(total=total, initial=done, disable=None if accelerator.is_local_main_process else True)
    metrics: dict[str, float] = {}
    for epoch in range(done // steps_an_epoch, epochs):
        model.train()
        train_loader.set_epoch(epoch)
        batches = train_loader
        skipped = (done - epoch * steps_an_epoch) * loop.gradient_accumulation_steps
        if skipped:
            batches = accelerator.skip_first_batches(train_loader, skipped)
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
            if (
                loop.checkpointing_steps
                and loop.checkpointing_steps.isdigit()
                and not done % int(loop.checkpointing_steps)
            ):
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
    if not metrics:  # taken up again after the last step
        metrics = evaluate(accelerator, model, eval_loaders, task, metric)
    if accelerator.is_main_process:
        Path(loop.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(loop.output_dir) / "all_results.json").write_text(json.dumps(metrics, indent=2))
    return model


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, loaders: dict[str, DataLoader], task: Task, metric: Metric
) -> dict[str, float]:
    """The official metrics on complete validation sets, gathered over the processes; rows that fill up the last batch
    count once.
    """
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


def load_checkpoint(accelerator: Accelerator, loop: LoopArguments, steps_an_epoch: int) -> int:
    """Load the state that `--resume_from_checkpoint` names; returns how many steps it has behind it."""
    if loop.resume_from_checkpoint is None:
        return 0
    path = Path(loop.resume_from_checkpoint)
    if loop.resume_from_checkpoint == "latest":
        saved = [
            p for p in Path(loop.output_dir).glob("*_*") if p.is_dir() and _steps_of(p, steps_an_epoch) is not None
        ]
        if not saved:
            return 0
        path = max(saved, key=lambda p: _steps_of(p, steps_an_epoch) or 0)
    steps = _steps_of(path, steps_an_epoch)
    if steps is None or not path.is_dir():
        raise DataError(f"{path} is no folder that --checkpointing_steps saved (step_100, epoch_0).")
    accelerator.print(f"going on from {path}")
    accelerator.load_state(str(path))
    return steps


def _steps_of(path: Path, steps_an_epoch: int) -> int | None:
    kind, _, number = path.name.partition("_")
    if kind not in ("step", "epoch") or not number.isdigit():
        return None
    return int(number) if kind == "step" else (int(number) + 1) * steps_an_epoch


if __name__ == "__main__":
    run_script(main)
