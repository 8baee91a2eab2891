"""Pushing to a Hub for real, and loading from it in new processes, with the real client over loopback HTTP.

The functions that the tests pass to `hub.run` run in processes of their own; nothing at the top of this file imports
hf_synthesizer, so that a process can be without it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hub_server import READ_TOKEN, HubServer

TEXT = "w5 w6 w7 w8"
USERS_CARD = """---
license: mit
tags:
- mine
pipeline_tag: sentence-similarity
---
# My model

Words of mine.
"""


def logits(model: Any) -> list[float]:
    import torch

    ids = torch.arange(4, 16).reshape(2, 6)
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **inputs).logits.flatten().tolist()


def example_dataset() -> list[dict[str, Any]]:
    return [{"input_ids": [2, 4 + i % 20, 5, 3], "attention_mask": [1] * 4, "labels": i % 2} for i in range(8)]


def training_arguments(folder: str, repo: str) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        max_steps=2,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        per_device_train_batch_size=4,
        push_to_hub=True,
        hub_model_id=repo,
        hub_always_push=True,
        hub_strategy="checkpoint",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def push_all(folder: str) -> dict[str, Any]:
    """Each way to push; what the models compute is handed back."""
    import torch
    from transformers import Trainer

    from hf_synthesizer import SynthesizerConfig, patch_model
    from hf_synthesizer.checkpoints.trainer_model_card import attach_model_card
    from tests.helpers.models import build
    from tests.helpers.word_tokenizer import tokenizer

    torch.manual_seed(0)
    expected = {}
    model = build("BertForSequenceClassification")
    model.config._name_or_path = "google-bert/bert-base-uncased"
    patch_model(model, "factorized_dense")
    model.push_to_hub("me/bert")
    tokenizer().push_to_hub("me/bert")
    expected["me/bert"] = logits(model)
    model.push_to_hub("me/bert", revision="draft")
    model.push_to_hub("me/described", tags=["extra"])
    tokenizer().push_to_hub("me/short")
    patch_model(build("BertForSequenceClassification"), "random", max_length=10).push_to_hub("me/short")

    t5 = patch_model(build("T5ForConditionalGeneration"), {"encoder": "dense+salience", "decoder.1": "random"})
    t5.save_pretrained(f"{folder}/t5", push_to_hub=True, repo_id="me/t5", max_shard_size="10KB")
    t5.save_pretrained(f"{folder}/t5", push_to_hub=True, repo_id="me/t5", max_shard_size="10KB")
    expected["me/t5"] = logits(t5)

    for repo in ("me/trained", "me/attached"):
        model = patch_model(build("BertForSequenceClassification"), SynthesizerConfig("random+dot_product"))
        trainer = Trainer(
            model,
            training_arguments(f"{folder}/{repo}", repo),
            train_dataset=example_dataset(),
            eval_dataset=example_dataset(),
            processing_class=tokenizer(),
        )
        if repo == "me/attached":
            attach_model_card(trainer)
        trainer.train()
        trainer.push_to_hub()
        expected[repo] = logits(model)
    return expected


def load_with_the_plugin(repos: list[str]) -> dict[str, Any]:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

    import hf_synthesizer  # noqa: F401

    found: dict[str, Any] = {}
    for repo in repos:
        auto = AutoModelForSeq2SeqLM if repo.endswith("t5") else AutoModelForSequenceClassification
        found[repo] = logits(auto.from_pretrained(repo))
    found["draft"] = logits(AutoModelForSequenceClassification.from_pretrained("me/bert", revision="draft"))
    pipe = pipeline("text-classification", "me/bert")
    inputs = AutoTokenizer.from_pretrained("me/bert")(TEXT, return_tensors="pt")
    found["pipeline"] = [
        logits(pipe.model),
        pipe(TEXT)[0]["score"],
        pipe.model(**inputs).logits.softmax(-1).max().item(),
    ]
    return found


def load_with_trust(repos: list[str]) -> dict[str, Any]:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, pipeline

    found: dict[str, Any] = {}
    try:
        AutoModelForSequenceClassification.from_pretrained("me/bert", trust_remote_code=False)
    except ValueError as error:
        found["untrusted"] = str(error)
    assert "hf_synthesizer" not in sys.modules
    for repo in repos:
        auto = AutoModelForSeq2SeqLM if repo.endswith("t5") else AutoModelForSequenceClassification
        found[repo] = logits(auto.from_pretrained(repo, trust_remote_code=True))
    found["draft"] = logits(
        AutoModelForSequenceClassification.from_pretrained("me/bert", revision="draft", trust_remote_code=True)
    )
    found["pipeline"] = logits(pipeline("text-classification", "me/bert", trust_remote_code=True).model)
    return found


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, dict[str, Any], Path]]:
    """A Hub to which everything has been pushed, what it should compute, and the folder it was pushed from."""
    folder = tmp_path_factory.mktemp("push")
    with HubServer() as server:
        server.add_files("me/described", {"README.md": USERS_CARD.encode()})
        yield server, server.run(push_all, folder, home=folder / "home"), folder


def card(server: HubServer, repo: str, revision: str = "main") -> str:
    return server.repos[repo].files(revision)["README.md"].decode()


@pytest.mark.xdist_group("hub")
def test_new_processes_load_bit_equal_logits(pushed: Any, tmp_path: Path) -> None:
    server, expected, _ = pushed
    repos = list(expected)
    found = server.run(load_with_the_plugin, repos, home=tmp_path / "plugin")
    trusted = server.run(load_with_trust, repos, home=tmp_path / "trust")
    for repo in repos:
        assert found[repo] == trusted[repo] == expected[repo], repo
    assert found["draft"] == trusted["draft"] == trusted["pipeline"] == expected["me/bert"]
    of_pipeline, score, reference = found["pipeline"]
    assert of_pipeline == expected["me/bert"] and score == reference
    assert "trust_remote_code=True" in trusted["untrusted"]


@pytest.mark.xdist_group("hub")
def test_what_lies_in_the_repo(pushed: Any) -> None:
    server, _, folder = pushed
    files = server.repos["me/bert"].files()
    assert {"README.md", "config.json", "model.safetensors", "modeling_hf_synthesizer.py"} <= set(files)
    assert json.loads(files["config.json"])["auto_map"] == {
        "AutoConfig": "modeling_hf_synthesizer.SynthesizerBertConfig",
        "AutoModelForSequenceClassification": "modeling_hf_synthesizer.SynthesizerBertForSequenceClassification",
    }
    shards = [name for name in server.repos["me/t5"].files() if name.endswith(".safetensors")]
    assert len(shards) > 2 and "model.safetensors.index.json" in server.repos["me/t5"].files()
    assert {file.name for file in (folder / "t5").iterdir()} <= set(server.repos["me/t5"].files())
    pickles = {name for repo in server.repos.values() for name in repo.files() if name.endswith((".bin", ".pt"))}
    assert {Path(name).name for name in pickles} <= {"training_args.bin", "optimizer.pt", "scheduler.pt"}  # Trainer's


@pytest.mark.xdist_group("hub")
def test_the_tokenizer_of_the_repo_learns_how_long_the_input_may_be(pushed: Any) -> None:
    server, *_ = pushed
    for repo, longest in (("me/short", 10), ("me/bert", 24)):
        files = server.repos[repo].files()
        assert json.loads(files["tokenizer_config.json"])["model_max_length"] == longest
        assert f"has at most {longest} tokens" in files["README.md"].decode() and "tokenizer.json" in files


@pytest.mark.xdist_group("hub")
def test_commits_during_training_can_be_loaded_too(pushed: Any) -> None:
    server, _, _ = pushed
    for repo in ("me/trained", "me/attached"):
        with_weights = [
            set(server.repos[repo].files(sha))
            for sha in server.repos[repo].commits
            if "model.safetensors" in server.repos[repo].files(sha)
        ]
        assert len(with_weights) >= 2
        assert all({"config.json", "modeling_hf_synthesizer.py"} <= names for names in with_weights)
        assert "last-checkpoint/modeling_hf_synthesizer.py" in with_weights[-1]


CARD = r"""---
base_model: google-bert/bert-base-uncased
library_name: transformers
pipeline_tag: text-classification
tags:
- synthesizer
- hf_synthesizer
- factorized_dense
---

# bert

<!-- hf_synthesizer: .*? -->
## Synthesizer attention

\[`google-bert/bert-base-uncased`\]\(\S+\), a `BertForSequenceClassification`,
in which 2 of 2 attention layers .*
\| `factorized_dense` \| A\[h, i, j mod a\] · .* \| 870 \| encoder 0, 1 \| max_length=24 \|

\| parameters \| before \| after \|
\|---\|---\|---\|
\| of these layers' logits \| 2,400 \| 1,740 \|
\| of the model \| [\d,]+ \| [\d,]+ \|

### How to load it

Install `hf_synthesizer` \(`pip install .*\), then

```python
import hf_synthesizer
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained\("me/bert"\)
```
.*trust_remote_code=True.*
### Citation

```bibtex
@inproceedings\{tay2021synthesizer,.*
```
<!-- hf_synthesizer: end -->
"""


@pytest.mark.xdist_group("hub")
def test_the_card(pushed: Any) -> None:
    assert re.fullmatch(CARD, card(pushed[0], "me/bert"), flags=re.DOTALL), card(pushed[0], "me/bert")


@pytest.mark.xdist_group("hub")
def test_an_existing_card_is_merged(pushed: Any) -> None:
    text = card(pushed[0], "me/described")
    head, _, rest = text.partition("\n---\n")
    assert "license: mit" in head and "pipeline_tag: sentence-similarity" in head
    for tag in ("mine", "extra", "synthesizer", "factorized_dense"):
        assert f"\n- {tag}" in head
    assert rest.strip().startswith("# My model\n\nWords of mine.\n\n<!-- hf_synthesizer:")


@pytest.mark.xdist_group("hub")
def test_a_trainers_card_with_results(pushed: Any) -> None:
    text = card(pushed[0], "me/attached")
    assert re.search(
        r"# attached.*`random\+dot_product`.*S_random = R\[h, i, j\].*### Training results.*\| Loss \| \d"
        r".*Validation Loss.*### Hyperparameters.*- learning_rate: 5e-05.*me/attached",
        text,
        flags=re.DOTALL,
    ), text
    assert "- generated_from_trainer" in text and "pipeline_tag: text-classification" in text
    of_trainer = card(pushed[0], "me/trained")
    assert "- generated_from_trainer" in of_trainer and "## Training procedure" in of_trainer
    assert (
        "- hf_synthesizer" in of_trainer and "- random+dot_product" in of_trainer
    )  # whose card it is, it has our tags


def meet_failures(folder: str, attempts: dict[str, str | None]) -> dict[str, Any]:
    """Push to and load from repos (by name, with a token) where it cannot succeed: the errors, and what is left."""
    import torch
    from transformers import AutoModel

    import hf_synthesizer
    from hf_synthesizer import patch_model
    from tests.helpers.models import build

    assert hf_synthesizer
    time.sleep = lambda seconds: None  # the client waits longer and longer between its attempts
    torch.manual_seed(0)
    model = patch_model(build("BertModel"), "dense")
    results: dict[str, Any] = {}

    def error_of(call: Any, *arguments: Any, **settings: Any) -> str:
        try:
            call(*arguments, **settings)
        except Exception as error:
            return f"{type(error).__name__}: {error} {error.__cause__ or ''} {getattr(error, '__notes__', '')}"
        return "no error"

    def is_whole(path: str) -> bool:
        loaded = AutoModel.from_pretrained(path)
        return all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())

    for repo, token in attempts.items():
        saved = f"{folder}/{repo}"
        results[repo] = {
            "push": error_of(model.push_to_hub, repo, token=token),
            "save": error_of(model.save_pretrained, saved, push_to_hub=True, repo_id=repo, token=token),
            "load": error_of(AutoModel.from_pretrained, repo, token=token),
            "saved": is_whole(saved) if Path(saved, "model.safetensors").exists() else None,
        }
    model.save_pretrained(f"{folder}/local")
    results["in memory"] = is_whole(f"{folder}/local")
    return results


def check_failure(found: dict[str, Any], repo: str, said: str, whole: bool | None) -> None:
    for way in ("push", "save"):
        assert re.search(said, found[repo][way]), found
        assert re.search(f"Pushing .* '{repo}' failed.*in memory is as it was", found[repo][way])
    assert found[repo]["saved"] is whole


@pytest.mark.xdist_group("hub")
def test_what_goes_wrong_is_an_error_and_harms_no_local_file(pushed: Any, tmp_path: Path) -> None:
    files = pushed[0].repos["me/bert"].files()
    attempts = {"me/full": None, "me/cut": None, "me/forbidden": READ_TOKEN, "me/unauthorized": "wrong-token"}
    with HubServer() as server:
        for repo in ("me/full", "me/cut", "me/unauthorized"):
            server.add_files(repo, files)
        server.fail_with("full", "/api/models/me/full/commit/*")
        server.fail_with("cut_upload", "/api/models/me/cut/commit/*")
        server.fail_with("cut_download", "/me/cut/resolve/*/model.safetensors")
        found = server.run(meet_failures, tmp_path, attempts, home=tmp_path / "home")
        assert all(repo.files()["model.safetensors"] == files["model.safetensors"] for repo in server.repos.values())
        assert set(server.repos) == {"me/full", "me/cut", "me/unauthorized"}
    assert found["in memory"] is True
    check_failure(found, "me/full", "507", True)
    check_failure(found, "me/cut", "RemoteProtocolError|ReadError|WriteError|ConnectError", True)
    check_failure(found, "me/forbidden", "403", None)  # refused before anything was written
    check_failure(found, "me/unauthorized", "401", None)
    assert re.search("me/cut.*(peer closed connection|without sending)", found["me/cut"]["load"])
    assert "me/unauthorized" in found["me/unauthorized"]["load"]
    assert found["me/forbidden"]["load"] != "no error"


@pytest.mark.xdist_group("hub")
def test_without_a_connection(tmp_path: Path) -> None:
    with HubServer() as server:
        server.stop()
        try:
            found = server.run(meet_failures, tmp_path, {"me/gone": None}, home=tmp_path / "home")
        finally:
            server.start()
    assert found["in memory"] is True
    check_failure(found, "me/gone", "ConnectError", None)
    assert "couldn't connect" in found["me/gone"]["load"]
