"""What a decoder keeps when few heads see all tokens: SmolLM2-135M on texts of 1,024 tokens, and on texts that it writes itself.

    python -m benchmarks.pretrained.fetch_weights WEIGHTS --models smollm2
    python -m benchmarks.pretrained.decoder_plans --weights WEIGHTS --list
    python -m benchmarks.pretrained.decoder_plans --weights WEIGHTS --points closed        # no training
    python -m benchmarks.pretrained.decoder_plans --weights WEIGHTS --only quarter-taught  # about three hours of one core
    python -m benchmarks.report.paper  # the table

A plan says what each group of heads that shares keys becomes (`PLANS`). `suggest_heads` measures two kinds: a window of 64 keys with the
stock logits, and `relative_dense`, which compares nothing. Groups whose window costs most stay stock. Of the others, those where
`relative_dense` costs least more than a window get it.

Points: `closed`, without training; and `taught`, after a transfer on some 2 million tokens of the training text: layer outputs first,
then the teacher's logits, all weights. The transfer saves its state, and a killed run goes on from there. Controls have the
heads of the plan cut to their own token, or zeroed.

Judged on windows of the test text (perplexity), on continuations of 512 tokens of the test text that the model samples (perplexity
under stock, and how many of their 4-grams were there before), and on a passkey in a text of 4,096 tokens (share of exact answers).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, set_seed

from benchmarks.heads.closed_forms import zero_heads
from benchmarks.measurements.records import RESULTS as ALL_RESULTS
from benchmarks.measurements.records import ROOT
from benchmarks.measurements.run_files import file_of, measured_on, missing, parser_of, write
from benchmarks.pretrained.generated import judge_continuations, judge_passkeys
from benchmarks.pretrained.tasks import Continuation
from examples.shared.loop import GroupedBatches
from hf_synthesizer import Suggestion, SynthesizerConfig, patch_model, suggest_heads, transfer_attention

RESULTS = ALL_RESULTS / "decoder_plans"
WINDOW = {"variant": "dot_product", "window": 64}
COMPARES_NOTHING = {"variant": "relative_dense"}
OWN_TOKEN = {"variant": "dot_product", "window": 1, "sinks": 0}
PLANS = {"stock": (1.0, 0.0), "quarter": (0.25, 0.25), "tenth": (0.1, 0.25), "none": (0.0, 0.25)}
"""The share of heads that see all tokens, and the share that compares nothing; all others have a window."""
POINTS = ("closed", "taught", "own_token", "zeroed")
MEASURED, MEASURED_LENGTH = 32, 256
"""Rows for costs and closed forms, and their tokens."""
STEPS = (0, 600, 1400)
"""Of the transfer, one row each: layer outputs, then the logits of the head."""
RATES = {"learning_rate": 1e-3, "backbone_learning_rate": 1e-4}


@dataclass(frozen=True)
class Run:
    """A plan at a point."""

    plan: str
    point: str

    @property
    def name(self) -> str:
        return f"{self.plan}-{self.point}"

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


class LongContinuation(Continuation):
    """WikiText-2 in windows of 1,024 tokens."""

    size = replace(Continuation.size, max_length=1024, rows=None, test_rows=None)


def all_runs() -> list[Run]:
    """Everything that the table needs."""
    runs = [Run("stock", "closed")]
    return runs + [Run(plan, point) for plan in PLANS if plan != "stock" for point in POINTS]


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, "quarter-closed", (), "outputs/decoder_plans", "costs and the states of transfers")
    parser.add_argument("--weights", type=Path, help="the folder that benchmarks/pretrained/fetch_weights.py filled")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="a folder with lm")
    parser.add_argument("--points", nargs="*", choices=POINTS, help="these points alone")
    parser.add_argument("--windows", type=int, help="judge on the first so many windows of the test (default: all)")
    parser.add_argument("--continuations", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few rows and steps, to try it; kept in --work_dir")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for and not there yet."""
    arguments = arguments_of(argv)
    folder = arguments.work_dir / "quick" / "results" if arguments.quick else RESULTS
    runs = [run for run in all_runs() if not arguments.points or run.point in arguments.points]
    to_do = missing(runs, lambda run: file_of(run.path(folder)), arguments)
    if not to_do:
        return
    where, bench = measured_on(), Bench(arguments)
    for run in to_do:
        result = {**bench.measure(run), **where}
        write(run.path(folder), result)
        print(f"{run.name}: {json.dumps(result['metrics'])}", flush=True)


class Bench:
    """The stock model, its text, and the costs of its heads."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.task = LongContinuation(arguments.data, arguments.work_dir, arguments.weights, arguments.quick)
        self.task.test = self.task.test[: arguments.windows]
        self.teacher: PreTrainedModel = self.task.build().eval()
        self.costs = self.task.work / "costs.json"

    @property
    def short_rows(self) -> GroupedBatches:
        """The first training tokens in short rows, for costs and closed forms."""
        length = min(MEASURED_LENGTH, self.task.size.max_length)
        ids = [token for row in self.task.rows[:MEASURED] for token in row["input_ids"]][: MEASURED * length]
        rows = [{"input_ids": ids[start : start + length]} for start in range(0, len(ids), length)]
        return GroupedBatches(rows, 4, self.task.collate, seed=0)

    def suggestion(self) -> Suggestion:
        """The costs of both kinds, measured once."""
        if not self.costs.exists():
            set_seed(0)
            found = suggest_heads(
                self.teacher, self.short_rows, variants=[WINDOW, COMPARES_NOTHING], budget=0.75, progress=False
            )
            self.costs.parent.mkdir(parents=True, exist_ok=True)
            found.save(self.costs)
        return Suggestion.load(self.costs)

    def plan(self, run: Run) -> dict[int | str, list[SynthesizerConfig]]:
        """The heads of each layer that are not stock, by kind."""
        seeing_all, comparing_nothing = PLANS[run.plan]
        config = self.teacher.config
        size = config.num_attention_heads // config.num_key_value_heads  # heads that share a key
        near, by_distance = (costs for _, costs in self.suggestion().menu)
        groups = [(layer, group) for layer in near for group in range(config.num_key_value_heads)]

        def cost(costs: Any, place: tuple[Any, int]) -> float:
            layer, group = place
            return sum(costs[layer][group * size : (group + 1) * size])

        free = sorted(groups, key=lambda place: cost(near, place))[: round((1 - seeing_all) * len(groups))]
        free.sort(key=lambda place: cost(by_distance, place) - cost(near, place))
        number = round(comparing_nothing * len(groups))
        kinds = [(free[:number], COMPARES_NOTHING), (free[number:], WINDOW)]
        if run.point in ("own_token", "zeroed"):
            kinds = [(free, OWN_TOKEN)]
        plan: dict[int | str, list[SynthesizerConfig]] = {}
        for places, kind in kinds:
            for layer in near:
                heads = [group * size + n for at, group in sorted(places) if at == layer for n in range(size)]
                if heads:
                    plan.setdefault(layer, []).append(SynthesizerConfig(heads=heads, **kind))
        return plan

    def converted(self, run: Run) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The patched model at the run's point, and how it came to be."""
        set_seed(0)
        model = copy.deepcopy(self.teacher)
        if run.plan == "stock":
            return model, {}
        plan = self.plan(run)
        patch_model(model, plan)
        chosen = {
            str(layer): {config.variant: list(config.heads or ()) for config in configs}
            for layer, configs in plan.items()
        }
        if run.point == "zeroed":
            for layer, configs in plan.items():
                projection = model.model.layers[int(layer)].self_attn.o_proj
                heads = [head for config in configs for head in config.heads or ()]
                zero_heads(projection, model.config.num_attention_heads, heads)
        if run.point in ("own_token", "zeroed"):
            return model, {"heads": chosen}
        transfer_attention(model, self.teacher, self.short_rows, method="average", progress=False)
        facts: dict[str, Any] = {"heads": chosen, "tokens": MEASURED * MEASURED_LENGTH}
        if run.point == "taught":
            steps = tuple(min(number, 2) for number in STEPS) if self.arguments.quick else STEPS
            rows = self.task.rows[: sum(steps)]
            started = time.process_time()
            report = transfer_attention(
                model,
                self.teacher,
                GroupedBatches(rows, 1, self.task.collate, seed=0),
                "distill",
                steps,  # type: ignore[arg-type]
                **RATES,
                autocast=torch.bfloat16,
                checkpoint_dir=self.task.work / run.name,
                save_steps=50,
            )
            facts |= {
                "steps": report.steps,
                "tokens": sum(len(row["input_ids"]) for row in rows),
                "seconds": time.process_time() - started,
                **RATES,
            }
        return model.eval(), facts

    def measure(self, run: Run) -> dict[str, Any]:
        """All figures of a model."""
        model, facts = self.converted(run)
        metrics: dict[str, Any] = dict(self.task.judge(model))
        quick = self.arguments.quick
        continuations = 2 if quick else self.arguments.continuations
        metrics |= judge_continuations(model, self.teacher, self.task.test, continuations, 8 if quick else 512)
        metrics |= judge_passkeys(model, self.task.tokenizer, self.task.rows, *((1, 24) if quick else (20, 4096)))
        metrics["cache_share"] = cache_bytes(model, 256 if quick else 8192) / cache_bytes(
            self.teacher, 256 if quick else 8192
        )
        return {"plan": run.plan, "point": run.point, "metrics": metrics, "windows": len(self.task.test), **facts}


@torch.no_grad()
def cache_bytes(model: PreTrainedModel, length: int, chunk: int = 512) -> int:
    """What a cache holds after so many tokens."""
    from hf_synthesizer.layers.caching import bytes_of

    cache = DynamicCache()
    for ids in torch.ones(1, length, dtype=torch.long).split(chunk, dim=1):
        model(ids, past_key_values=cache, logits_to_keep=1)
    return sum(bytes_of(layer) for layer in cache.layers)


if __name__ == "__main__":
    main()
