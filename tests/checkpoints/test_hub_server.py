"""The Hub of `hub_server.py` seen by the real `huggingface_hub` client and by Transformers.

The client functions run in processes of their own (`HubServer.run`): what they return is compared here with what
the server has.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from tests.helpers.hub_server import READ_TOKEN, HubServer, hub  # noqa: F401

CONFIG = b'{"model_type": "bert"}\n'
WEIGHTS = Random(0).randbytes(11 * 2**20)  # LFS by its size and by its name
NEW_WEIGHTS = Random(1).randbytes(100)


def outcome(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[str]:
    """The names of the errors that `call` raises and of their causes, and the message of the first."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        names: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            names.append(type(cause).__name__)
            cause = cause.__cause__
        return [str(error), *names]
    return []


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def upload_and_download(folder: str) -> dict[str, Any]:
    api, repo = HfApi(), "me/model"
    url = str(api.create_repo(repo))
    again = outcome(api.create_repo, repo)
    api.create_repo(repo, exist_ok=True)
    first = api.upload_folder(repo_id=repo, folder_path=folder).oid
    unchanged = api.upload_folder(repo_id=repo, folder_path=folder).oid
    api.create_tag(repo, tag="v1")
    (Path(folder) / "README.md").unlink()
    (Path(folder) / "nested/model.safetensors").write_bytes(NEW_WEIGHTS)
    second = api.upload_folder(repo_id=repo, folder_path=folder, delete_patterns="README.md").oid
    api.create_branch(repo, branch="draft", revision=first)
    api.delete_file("nested/config.json", repo, revision="draft")
    downloaded = {
        revision: Path(hf_hub_download(repo, "nested/model.safetensors", revision=revision)).read_bytes().hex()[:64]
        for revision in ("main", "v1", first, second)
    }
    snapshot = Path(snapshot_download(repo, revision="v1"))
    local = Path(snapshot_download(repo, local_dir=Path(folder).parent / "local"))
    info = api.model_info(repo, files_metadata=True)
    old_info = api.model_info(repo, revision="v1")
    return {
        "url": url,
        "again": again,
        "user": api.whoami()["name"],
        "commits": [first, unchanged, second],
        "downloaded": downloaded,
        "snapshot": {path.name: sha256_of(path) for path in snapshot.rglob("*.*")},
        "local": sorted(path.name for path in local.rglob("*") if ".cache" not in path.parts and path.is_file()),
        "info": [info.id, info.sha, {file.rfilename: [file.size, bool(file.lfs)] for file in info.siblings or []}],
        "old": [old_info.sha, [file.rfilename for file in old_info.siblings or []]],
        "draft": api.list_repo_files(repo, revision="draft"),
        "tree": [[type(entry).__name__, entry.path] for entry in api.list_repo_tree(repo)],
        "nested": [entry.path for entry in api.list_repo_tree(repo, "nested", revision="draft")],
    }


def test_upload_and_download(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "folder"
    (folder / "nested").mkdir(parents=True)
    (folder / "README.md").write_text("---\ntags: [x]\n---\n# Card\n")
    (folder / "nested/config.json").write_bytes(CONFIG)
    (folder / "nested/model.safetensors").write_bytes(WEIGHTS)
    client = hub.run(upload_and_download, folder, home=tmp_path)

    repo = hub.repos["me/model"]
    first, unchanged, second = client["commits"]
    assert client["url"] == f"{hub.url}/me/model"
    assert client["user"] == "me"
    assert "409" in client["again"][0]
    assert first == unchanged == repo.sha("v1") != second == repo.sha("main")
    assert repo.files(first)["nested/model.safetensors"] == WEIGHTS
    assert repo.files(first)["nested/config.json"] == CONFIG
    assert repo.files()["nested/model.safetensors"] == NEW_WEIGHTS

    old, new = WEIGHTS.hex()[:64], NEW_WEIGHTS.hex()[:64]
    assert client["downloaded"] == {"main": new, "v1": old, first: old, second: new}
    assert client["snapshot"]["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert client["snapshot"]["config.json"] == hashlib.sha256(CONFIG).hexdigest()
    assert client["local"] == [".gitattributes", "config.json", "model.safetensors"]
    sizes = {".gitattributes": [50, False], "nested/config.json": [23, False]}
    assert client["info"] == ["me/model", second, sizes | {"nested/model.safetensors": [100, True]}]
    assert client["old"] == [first, [".gitattributes", "README.md", "nested/config.json", "nested/model.safetensors"]]
    assert client["draft"] == [".gitattributes", "README.md", "nested/model.safetensors"]
    assert client["tree"] == [["RepoFile", ".gitattributes"], ["RepoFolder", "nested"]]
    assert client["nested"] == ["nested/model.safetensors"]
    assert len([request for request in hub.requests if request.method == "PUT"]) == 2
    assert all(request.status for request in hub.requests)


def use_a_dataset() -> list[Any]:
    api = HfApi()
    api.create_repo("me/data", repo_type="dataset", private=True)
    api.upload_file(path_or_fileobj=b"a,b\n1,2\n", path_in_repo="train.csv", repo_id="me/data", repo_type="dataset")
    api.upload_file(path_or_fileobj=NEW_WEIGHTS, path_in_repo="x.parquet", repo_id="me/data", repo_type="dataset")
    path = hf_hub_download("me/data", "train.csv", repo_type="dataset")
    names = [file.rfilename for file in api.dataset_info("me/data").siblings or []]
    api.create_repo("me/unwanted")
    api.delete_repo("me/unwanted")
    return [Path(path).read_text(), names, api.repo_exists("me/unwanted")]


def test_dataset_and_deleted_repo(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    text, names, unwanted = hub.run(use_a_dataset, home=tmp_path)
    assert text == "a,b\n1,2\n"
    assert names == [".gitattributes", "train.csv", "x.parquet"]
    assert not unwanted
    assert list(hub.repos) == ["datasets/me/data"]


def bert_logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(12).reshape(2, 6)).last_hidden_state.flatten().tolist()


def push_bert(repo: str) -> Any:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertModel(config).eval()
    model.push_to_hub(repo)
    model.push_to_hub(repo, revision="draft")
    return bert_logits(model)


def load_bert(repo: str) -> list[Any]:
    from transformers import AutoModel

    return [bert_logits(AutoModel.from_pretrained(repo, revision=revision)) for revision in ("main", "draft")]


def test_push_to_hub_and_from_pretrained(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    pushed = hub.run(push_bert, "me/bert", home=tmp_path / "one")
    assert set(hub.repos["me/bert"].files()) == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    assert hub.repos["me/bert"].commits[hub.repos["me/bert"].sha()]["model.safetensors"].lfs
    hub.requests.clear()
    assert hub.run(load_bert, "me/bert", home=tmp_path / "two") == [pushed, pushed]
    assert {request.method for request in hub.requests} == {"GET", "HEAD"}


def do_not_wait() -> None:
    """The client waits up to 23 seconds between its attempts."""
    time.sleep = lambda seconds: None


def meet_refusals(folder: str, unreachable: str) -> dict[str, list[str]]:
    do_not_wait()
    api, wrong, reader = HfApi(), HfApi(token="wrong"), HfApi(token=READ_TOKEN)
    upload = {"folder_path": folder, "repo_id": "me/model"}
    return {
        "no repo": outcome(hf_hub_download, "me/missing", "config.json"),
        "no repo's info": outcome(api.model_info, "me/missing"),
        "no revision": outcome(hf_hub_download, "me/model", "config.json", revision="missing"),
        "no file": outcome(hf_hub_download, "me/model", "missing.json"),
        "wrong token": outcome(hf_hub_download, "me/model", "config.json", token="wrong"),
        "wrong token, new repo": outcome(wrong.create_repo, "me/new"),
        "wrong token, upload": outcome(wrong.upload_folder, **upload),
        "reader": outcome(reader.model_info, "me/model"),
        "reader, new repo": outcome(reader.create_repo, "me/new"),
        "reader, known repo": outcome(reader.create_repo, "me/model", exist_ok=True),
        "reader, upload": outcome(reader.upload_folder, **upload),
        "nobody": outcome(hf_hub_download, "me/model", "config.json", token=False),
        "nobody, upload": outcome(HfApi(token=False).upload_folder, **upload),
        "unreachable, upload": outcome(HfApi(endpoint=unreachable).create_repo, "me/model"),
        "unreachable, download": outcome(HfApi(endpoint=unreachable).hf_hub_download, "me/model", "new.json"),
    }


def test_refusals(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    head = hub.add_files("me/model", {"config.json": CONFIG})
    with HubServer() as stopped:
        stopped.add_files("me/model", {"new.json": CONFIG})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_bytes(b"{}")
    errors = hub.run(meet_refusals, tmp_path / "folder", stopped.url, home=tmp_path)

    names = {case: error[1] for case, error in errors.items() if error}
    assert names == {
        "no repo": "RepositoryNotFoundError",
        "no repo's info": "RepositoryNotFoundError",
        "no revision": "RevisionNotFoundError",
        "no file": "RemoteEntryNotFoundError",
        "wrong token": "HfHubHTTPError",
        "wrong token, new repo": "HfHubHTTPError",
        "wrong token, upload": "HfHubHTTPError",
        "reader, new repo": "HfHubHTTPError",
        "reader, upload": "HfHubHTTPError",
        "nobody, upload": "HfHubHTTPError",
        "unreachable, upload": "ConnectError",
        "unreachable, download": "LocalEntryNotFoundError",
    }
    for case, error in errors.items():
        status = {"wrong": "401", "reader": "403", "nobody": "401"}.get(case.split(" ")[0].rstrip(","), "")
        assert not error or status in error[0]
    assert hub.repos["me/model"].sha() == head
    assert set(hub.repos) == {"me/model"}


def meet_failures(folder: str) -> dict[str, Any]:
    do_not_wait()
    api, repo, paths = HfApi(), "me/model", {path.stem: path for path in Path(folder).iterdir()}

    def upload(name: str) -> list[str]:
        return outcome(api.upload_file, path_or_fileobj=paths[name], path_in_repo=f"{name}.bin", repo_id=repo)

    interrupted = outcome(hf_hub_download, repo, "large.bin")
    left_behind = [path.name for path in Path(os.environ["HF_HOME"]).rglob("blobs/*")]
    return {
        "interrupted download": interrupted,
        "left behind": left_behind,
        "resumed download": sha256_of(Path(hf_hub_download(repo, "resumed.bin"))),
        "full": upload("full"),
        "interrupted upload": upload("interrupted"),
        "resumed upload": upload("resumed"),
    }


def test_full_and_cut_off(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    large = WEIGHTS * 2  # the client resumes at whole pieces of 10 MB
    head = hub.add_files("me/model", {"large.bin": large, "resumed.bin": large})
    folder = tmp_path / "folder"
    folder.mkdir()
    hrefs = {}
    for name in ("full", "interrupted", "resumed"):
        content = os.urandom(2**20)
        (folder / f"{name}.data").write_bytes(content)
        hrefs[name] = f"/lfs/{hashlib.sha256(content).hexdigest()}"
    hub.fail_with("cut_download", "*/large.bin")
    hub.fail_with("cut_download", "*/resumed.bin", times=1)
    hub.fail_with("full", hrefs["full"])
    hub.fail_with("cut_upload", hrefs["interrupted"])
    hub.fail_with("cut_upload", hrefs["resumed"], times=1)
    client = hub.run(meet_failures, folder, home=tmp_path)

    assert client["interrupted download"][1] == "RemoteProtocolError"
    assert client["left behind"] == []
    assert client["resumed download"] == hashlib.sha256(large).hexdigest()
    assert client["full"][1:3] == ["RuntimeError", "HfHubHTTPError"]
    assert client["interrupted upload"][1] == "RuntimeError"
    assert client["resumed upload"] == []
    repo = hub.repos["me/model"]
    assert list(repo.commits) == [head, repo.sha()]  # only what was resumed has become a commit
    assert set(repo.files()) == {"large.bin", "resumed.bin"}
    ranges = {request.headers["range"] for request in hub.requests if "range" in request.headers}
    assert ranges == {f"bytes={10 * 2**20}-"}


def test_stopped_hub_listens_on_its_port_again() -> None:
    server = HubServer()
    with server:
        url = server.url
    with server:
        assert server.url == url
