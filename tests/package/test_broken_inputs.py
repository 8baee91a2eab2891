"""What a user hands over that cannot be, or a failing disk leaves half done: one sentence, and nothing lost."""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_synthesizer import (
    CheckpointMismatchError,
    InvalidConfigError,
    NoMatchingLayerError,
    Suggestion,
    SynthesizerConfig,
    SynthesizerError,
    patch_model,
    transfer_attention,
)
from hf_synthesizer.checkpoints.model_card import write_model_card
from hf_synthesizer.checkpoints.tokenizer_length import shorten_saved
from hf_synthesizer.patching.layer_text import parse_layers
from hf_synthesizer.plots import plot_suggestion, plot_transfer
from hf_synthesizer.synthesizers.head_sizes import HeadShape
from tests.helpers.models import build
from tests.helpers.teaching import HEADS, loader, student_of

LAYERS = {0: [0.1, 0.0, 0.3], 1: [0.2, 0.4, 0.05]}


@contextmanager
def a_full_disk() -> Iterator[None]:
    """Inside, no file grows beyond some bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_leaves_the_users_card_and_tokenizer(tmp_path: Path) -> None:
    model = patch_model(build("BertModel"), "random", max_length=8)
    card, settings = tmp_path / "README.md", tmp_path / "tokenizer_config.json"
    card.write_text("# Mine\n\nWords of my own.\n")
    settings.write_text(json.dumps({"model_max_length": 512, "mine": "kept"}))
    card.chmod(0o600)
    before = {path: path.read_text() for path in (card, settings)}
    with a_full_disk():
        for write in (lambda: write_model_card(model, tmp_path), lambda: shorten_saved(tmp_path, 8)):
            with pytest.raises(OSError, match="File too large"):
                write()
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
    write_model_card(model, tmp_path)
    shorten_saved(tmp_path, 8)
    assert "Words of my own." in card.read_text() and card.stat().st_mode & 0o777 == 0o600
    assert json.loads(settings.read_text()) == {"model_max_length": 8, "mine": "kept"}
    assert set(tmp_path.iterdir()) == set(before)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_transfer_says_what_to_do(tmp_path: Path, share: float) -> None:
    teacher, batches = build(HEADS["bert"]), loader(HEADS["bert"])
    settings: dict[str, Any] = {"steps": (2, 2), "checkpoint_dir": tmp_path, "save_steps": 1, "progress": False}
    transfer_attention(student_of(teacher, "random"), teacher, batches, **settings)
    whole = (tmp_path / "transfer.pt").read_bytes()
    (tmp_path / "transfer.pt").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointMismatchError, match="truncated or damaged .* Remove it to start the transfer again"):
        transfer_attention(student_of(teacher, "random"), teacher, batches, **settings)


def test_a_transfer_that_holds_something_else(tmp_path: Path) -> None:
    teacher, batches = build(HEADS["bert"]), loader(HEADS["bert"])
    settings: dict[str, Any] = {"steps": (1, 1), "checkpoint_dir": tmp_path, "progress": False}
    for held in ({}, [1], {"settings": "[]"}, {"settings": "{}", "report": ""}):
        torch.save(held, tmp_path / "transfer.pt")
        with pytest.raises(CheckpointMismatchError, match="transfer.pt"):
            transfer_attention(student_of(teacher, "random"), teacher, batches, **settings)


@pytest.mark.parametrize(
    "text", ["0-999999999999", "0-99999", "5-3", "decoder.5-3", "9" * 5000, "²", "encoder.٣", "0-", "-1", "0.5", "a b"]
)
def test_layers_that_no_command_line_can_mean(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="give indices and ranges such as 0-3,5"):
        parse_layers(text)


def test_more_layers_than_memory_holds() -> None:
    with pytest.raises(NoMatchingLayerError, match="No layer 2 in this model"):
        patch_model(build("BertModel"), "random", layers=range(10**12), max_length=8)


@pytest.mark.parametrize("layers", [slice("a", None), slice(0, 2, 0), slice(None, 1.5), slice(None, None, "b")])
def test_a_bad_slice(layers: slice) -> None:
    with pytest.raises(NoMatchingLayerError, match=r"is no slice of layers .*slice\(0, 6, 2\)"):
        patch_model(build("BertModel"), "random", layers=layers, max_length=8)


def test_a_predicate_that_raises() -> None:
    model = build("BertModel")
    for predicate, reason in (
        (lambda name, module: {}["x"], "KeyError: 'x'"),
        (lambda name: True, "TypeError: .*argument"),
    ):
        with pytest.raises(NoMatchingLayerError, match=f"failed on layer 'encoder.layer.0.attention.self': {reason}"):
            patch_model(model, "random", layers=predicate, max_length=8)
    assert type(model).__name__ == "BertModel"


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("factorized_random", {"rank": 10**12}, "rank must be at most 8,192"),
        ("lsh_simple", {"num_hashes": 10**7}, "num_hashes must be at most 1,024"),
        ("sparse_strided", {"stride": 10**30}, "stride must be at most"),
        ("random", {"max_length": 10**30}, "max_length must be at most"),
        (
            "random",
            {"max_length": 2**31 - 1},
            "'random' with max_length=2147483647 cannot be built: .*Lower max_length",
        ),
        ("random+salience", {"max_length": 2**31 - 1}, "cannot be built"),
        ("factorized_dense", {"factors": (10**12, 10**12)}, "cannot be built"),
    ],
)
def test_options_too_large_for_any_machine(variant: str, options: dict[str, Any], message: str) -> None:
    model = build("BertModel")
    with pytest.raises(InvalidConfigError, match=message):
        patch_model(model, variant, **{"max_length": 8, **options})
    assert type(model).__name__ == "BertModel"


def mutated(data: Any, chance: random.Random) -> Any:
    """The same JSON with something else in one place."""
    data = copy.deepcopy(data)
    node, place = {"": data}, ""
    whole = node
    while True:
        inner = node[place]
        if not isinstance(inner, (dict, list)) or not inner or chance.random() < 0.2:
            break
        node, place = inner, chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    others = [
        None,
        True,
        -1,
        0,
        3,
        10**400,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "²",
        "--5",
        "random",
        [],
        {},
    ]
    others += [[0], [[0]], {"variant": "random"}, {"variant": 3}, {"variant": "random", "heads": [7]}, {"0": "dense"}]
    if isinstance(node, dict) and node is not whole and chance.random() < 0.3:
        value = node.pop(place)
        if chance.random() < 0.5:
            node[chance.choice(["²", "--5", "7", "x", "-1"])] = value
    else:
        node[place] = chance.choice(others)
    return whole[""]


def use(suggestion: Suggestion) -> None:
    """All that a user does with a suggestion, but to draw it."""
    str(suggestion), suggestion.to_dict(), json.dumps(suggestion.to_dict())
    if suggestion.variant is not None:
        assert suggestion.picture() and suggestion.order and suggestion.at(0.5)
    patch_model(build("BertModel"), suggestion, max_length=8)


@pytest.mark.parametrize("unit", ["heads", "layers", "menu"])
def test_a_suggestion_from_a_broken_json_is_refused_or_can_be_used(unit: str) -> None:
    variant = SynthesizerConfig("random", max_length=8)
    whole = Suggestion.of_heads(variant, LAYERS, 4, {4: 0.01}, {0: 3})
    if unit == "layers":
        whole = Suggestion({0: variant, 1: "dense"}, {"encoder.0": 0.1, "encoder.1": 0.3}, {"encoder.0": 0.1})
    if unit == "menu":
        kinds = [variant, SynthesizerConfig("dot_product", window=2)]
        shapes = dict.fromkeys(LAYERS, HeadShape(12, 4, 3))
        budget = {"multiply_adds": 0.9, "length": 8}
        whole = Suggestion.of_heads(kinds, [LAYERS, LAYERS], budget, {4: 0.01}, {0: 3}, shapes)
    text = json.dumps(whole.to_dict())
    refused, broken = 0, None
    for number in range(600):
        chance = random.Random(number)
        if number % 3:
            broken = mutated(json.loads(text), chance)
        else:
            place = chance.randrange(len(text))
            with suppress(ValueError):
                broken = json.loads(text[:place] + chance.choice('{}[],:"0aé') + text[place + chance.randrange(2) :])
        try:
            suggestion = Suggestion.from_dict(broken)
            use(suggestion)
            if number % 20 == 0:
                plot_suggestion(suggestion)
        except SynthesizerError as error:
            assert str(error)
            refused += 1
    assert 200 < refused < 600


def test_a_file_that_is_no_suggestion(tmp_path: Path) -> None:
    for text in ("", "{", '{"variant": ', "[" * 100_000, "\x00", "nul"):
        (tmp_path / "heads.json").write_text(text)
        with pytest.raises(InvalidConfigError, match="heads.json is no JSON"):
            Suggestion.load(tmp_path / "heads.json")
    for data in (None, 3, [], "x", {"heads": 3}, {"hybrid": [1]}):
        with pytest.raises(InvalidConfigError):
            plot_suggestion(data)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfigError, match="no report of transfer_attention"):
            plot_transfer(data)  # type: ignore[arg-type]
