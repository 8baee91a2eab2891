"""Patches a tiny model of every model type of the installed Transformers, and checks the laws of `laws.py`.

    python -m benchmarks.model_types.survey                     # all types; half an hour on one core
    python -m benchmarks.model_types.survey --types llama,clip  # these alone; the other rows stay as they are
    python -m benchmarks.model_types.survey --quick --output -  # one type for each layer class, printed
    python -m benchmarks.model_types.survey --data              # only writes what list_model_types() reads, from the results

Each type has a process of its own, so that none can spoil another; what goes wrong in it becomes its row. The rows are
the same at each run: seeds are fixed, and nothing in them depends on the machine.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from benchmarks.measurements.records import RESULTS, ROOT, Row, read
from benchmarks.model_types.examine import FIELDS, SERVED, WRONG, examine

OUTPUT = RESULTS / "coverage.csv"
SERVED_TYPES = ROOT / "hf_synthesizer" / "layers" / "finding" / "served.csv"
QUICK = (
    "albert",
    "bart",
    "bert",
    "bert-generation",
    "bridgetower",
    "deberta",
    "distilbert",
    "eomt",
    "esm",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "llama4",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "olmo2",
    "opt",
    "t5",
    "vision-encoder-decoder",
    "wav2vec2",
    "whisper",
)
"""A type for each kind of layer class, a layer that keeps the stock forward, a composite, refusals, and types that have gone wrong in ways of their own."""
SECONDS = 180
"""The longest time that one type may take."""


def isolated(model_type: str, seconds: int = SECONDS) -> Row:
    """The row of a type, from a process of its own; a process that dies or never ends has a row too."""
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, sender))
    process.start()
    sender.close()
    lost = dict.fromkeys(FIELDS, "") | {"model_type": model_type, "transformers": version("transformers")}
    try:
        row = receiver.recv() if receiver.poll(seconds) else lost | {"status": WRONG, "why": f"more than {seconds} s"}
    except EOFError:
        row = lost | {"status": WRONG, "why": "its process died"}
    if process.is_alive():
        process.join(5)
        process.kill()
    process.join()
    return row


def _send(model_type: str, sender: Connection) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - models that print do so into a table
    sender.send(examine(model_type))


def write(path: Path, rows: Iterable[Row], fields: Iterable[str] = FIELDS) -> None:
    """The rows, sorted by model type."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(fields), restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["model_type"]))
    temporary.replace(path)


def write_served(rows: Iterable[Row]) -> None:
    """What the package itself knows: the served types, and the layer class of each."""
    write(SERVED_TYPES, (row for row in rows if row["status"] == SERVED), ("model_type", "layer_class"))


def main(argv: list[str] | None = None) -> None:
    """Examine types, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all if left out")
    parser.add_argument("--quick", action="store_true", help="one type for each layer class")
    parser.add_argument("--workers", type=int, default=1, help="how many types at a time, of one thread each")
    parser.add_argument("--output", default=str(OUTPUT), help="a CSV file, or - for what can be read")
    parser.add_argument("--data", action="store_true", help="examine nothing; write what list_model_types() reads")
    arguments = parser.parse_args(argv)
    path = Path(arguments.output)
    if arguments.data:
        write_served(read(OUTPUT))
        return
    types = QUICK if arguments.quick else tuple(CONFIG_MAPPING_NAMES)
    types = tuple(arguments.types.split(",")) if arguments.types else types
    rows = {row["model_type"]: row for row in read(path)} if arguments.output != "-" else {}
    if not (arguments.types or arguments.quick):
        rows = {name: row for name, row in rows.items() if name in types}
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    examine("bert")  # imports here, once, what every process would import
    with ThreadPoolExecutor(arguments.workers) as pool:
        for row in pool.map(isolated, types):
            rows[row["model_type"]] = row
            print(row["model_type"], row["status"], row["layer_class"], row["why"], sep=" | ", flush=True)
            if arguments.output != "-":
                write(path, rows.values())
    if path == OUTPUT:
        write_served(rows.values())


if __name__ == "__main__":
    main()
