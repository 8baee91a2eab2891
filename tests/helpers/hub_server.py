"""A small Hub on loopback for the real `huggingface_hub` client, kept in memory.

The client reads `HF_ENDPOINT` when it is imported, so it belongs in a process with `hub.environment(home)`:

    hub.run(push, "me/model", home=tmp_path)        # `push`, a module-level function, in a new process
    hub.repos["me/model"].files()["config.json"]    # what has arrived
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

WRITE_TOKEN, READ_TOKEN = "write-token", "read-token"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".onnx", ".parquet", ".arrow", ".zip", ".gz")
FailureKind = Literal["full", "cut_upload", "cut_download"]

API_REPO = "/api/(?:models/|(?=datasets/|spaces/))(?P<repo>(?:datasets/|spaces/)?[^/]+(?:/[^/]+)??)"
WEB_REPO = "/(?P<repo>(?:datasets/|spaces/)?[^/]+(?:/[^/]+)?)"
ROUTES = {  # the first match wins; the method of `HubServer` gets the pattern's groups
    "GET /api/whoami-v2": "whoami",
    "POST /api/validate-yaml": "validate_card",
    "(POST|DELETE) /api/repos/(?P<action>create|delete)": "create_or_delete_repo",
    f"POST {API_REPO}/preupload/(?P<revision>[^/]+)": "preupload",
    rf"POST {WEB_REPO}\.git/info/lfs/objects/batch": "lfs_batch",
    "(PUT|POST) /lfs/(?P<oid>[0-9a-f]{64})": "lfs_upload_or_verify",
    f"POST {API_REPO}/commit/(?P<branch>[^/]+)": "commit",
    f"POST {API_REPO}/(?P<kind>branch|tag)/(?P<name>[^/]+)": "create_reference",
    f"GET {API_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?": "tree",
    f"GET {API_REPO}(?:/revision/(?P<revision>[^/]+))?": "info",
    f"(HEAD|GET) {WEB_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": "resolve",
}


@dataclass(frozen=True)
class File:
    content: bytes
    lfs: bool

    @property
    def etag(self) -> str:
        """SHA-256 of an LFS file, git's SHA-1 of a regular one."""
        blob = b"blob %d\0%s" % (len(self.content), self.content)
        return hashlib.sha256(self.content).hexdigest() if self.lfs else hashlib.sha1(blob).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        etag, size = self.etag, len(self.content)
        lfs = {"oid": etag, "sha256": etag, "size": size, "pointerSize": 134} if self.lfs else None
        return {"type": "file", "path": path, "rfilename": path, "size": size, "oid": etag[:40], "lfs": lfs}


@dataclass
class Repo:
    name: str
    commits: dict[str, dict[str, File]] = field(default_factory=dict)  # all files by sha, oldest first
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def sha(self, revision: str = "main") -> str:
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: file.content for path, file in self.commits[self.sha(revision)].items()}

    def commit(self, branch: str, files: dict[str, File]) -> str:
        sha = os.urandom(20).hex()
        self.commits[sha], self.branches[branch] = dict(sorted(files.items())), sha
        return sha


@dataclass
class Request:
    """A recorded request; `status` stays 0 when the connection was cut before an answer."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # lower-case names
    body: bytes = b""
    status: int = 0


@dataclass
class Answer:
    content: Any  # bytes, or what becomes JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None  # number of bytes after which the connection is cut


class Refusal(Exception):
    """An answer that is an error; `code` is what the client tells the kinds of 404 apart by."""

    def __init__(self, status: int, message: str, code: str = "", commit: str = "") -> None:
        headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}
        self.answer = Answer({"error": message}, status, {name: value for name, value in headers.items() if value})


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > 10 * 2**20


class HubServer:
    """The Hub; a test may look at all and change it, stop it, and start it again on the same port."""

    def __init__(self) -> None:
        self.user, self.url, self.port = "me", "", 0
        self.tokens = {WRITE_TOKEN: "write", READ_TOKEN: "read"}
        self.repos: dict[str, Repo] = {}  # "me/model", "datasets/me/data"
        self.objects: dict[str, bytes] = {}  # LFS contents by SHA-256
        self.requests: list[Request] = []
        self.failures: dict[tuple[FailureKind, str], int] = {}  # by kind and pattern: how often still
        self.lock = threading.RLock()

    def start(self) -> "HubServer":
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), type("Connection", (Connection,), {"hub": self}))
        self.port, self.url = self.http.server_port, f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    __enter__, __exit__ = start, stop

    def environment(self, home: Path | str, token: str | None = WRITE_TOKEN) -> dict[str, str]:
        """Variables for a client process that keeps its cache in `home`; without a token it is anonymous."""
        foreign = re.compile(r"(HF|HUGGING\w*|TRANSFORMERS)_\w+|\w+_proxy", re.IGNORECASE)
        inherited = {name: value for name, value in os.environ.items() if not foreign.fullmatch(name)}
        switches = {f"HF_HUB_DISABLE_{what}": "1" for what in ("XET", "PROGRESS_BARS", "TELEMETRY")}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "*", "DISABLE_SAFETENSORS_CONVERSION": "1"}
        return inherited | switches | ours | ({"HF_TOKEN": token} if token else {})

    def run(self, function: Callable[..., Any], *arguments: Any, home: Path, token: str | None = WRITE_TOKEN) -> Any:
        """Call a module-level function in a new process against this Hub; arguments and result travel as JSON."""
        call = f"module.{function.__qualname__}(*json.loads({json.dumps(arguments, default=str)!r}))"
        script = f"import json, {function.__module__} as module; print('\\n' + json.dumps({call}))"
        options: dict[str, Any] = {"cwd": Path(__file__).parents[2], "env": self.environment(home, token)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, **options)
        assert done.returncode == 0, f"{function.__qualname__} failed:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def fail_with(self, kind: FailureKind, path: str = "*", times: int = sys.maxsize) -> None:
        """Fail on requests whose path matches, `times` times or until `failures` is cleared.

        `full` answers LFS contents and commits with 507; `cut_upload` reads half of theirs and cuts the connection;
        `cut_download` never sends a file's second half, whichever range is asked for.
        """
        self.failures[kind, path] = times

    def failing(self, kind: FailureKind, request: Request) -> bool:
        with self.lock:
            for (failure, path), times in list(self.failures.items()):
                if failure == kind and times > 0 and fnmatch(request.path, path):
                    self.failures[failure, path] = times - 1
                    return True
        return False

    def add_files(self, name: str, files: dict[str, bytes]) -> str:
        """Commit to `main` without a client, to a new repo if there is none; returns the sha."""
        with self.lock:
            repo = self.repos.setdefault(name, Repo(name))
            kept = repo.commits.get(repo.branches.get("main", ""), {})
            added = {path: File(data, is_lfs(path, len(data))) for path, data in files.items()}
            return repo.commit("main", kept | added)

    def answer(self, request: Request, raw_path: str) -> Any:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        role = self.tokens.get(token)
        if token and role is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if request.method in ("POST", "DELETE") and role != "write":
            raise Refusal(403 if role else 401, "It takes a token with write access to do this")
        for pattern, name in ROUTES.items():
            if match := re.fullmatch(pattern, f"{request.method} {raw_path}"):
                groups: dict[str, Any] = {group: unquote(text) for group, text in match.groupdict().items() if text}
                with self.lock:
                    if "repo" in groups:
                        groups["repo"] = self.known_repo(groups["repo"])
                    return getattr(self, name)(request, **groups)
        raise Refusal(404, f"This Hub has no {request.method} {request.path}")

    def known_repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise Refusal(404, f"Repository not found: {name}", "RepoNotFound")
        return self.repos[name]

    def whoami(self, request: Request) -> Any:
        return {"type": "user", "name": self.user, "orgs": []}

    def validate_card(self, request: Request) -> Any:
        return {"errors": [], "warnings": []}

    def create_or_delete_repo(self, request: Request, action: str) -> Any:
        wanted = json.loads(request.body)
        folder = "" if wanted.get("type") in (None, "model") else wanted["type"] + "s/"
        name = f"{folder}{wanted.get('organization') or self.user}/{wanted['name']}"
        answer = {"url": f"{self.url}/{name}", "name": name}
        if action == "delete":
            del self.repos[self.known_repo(name).name]
        elif name in self.repos:
            return Answer(answer | {"error": "You already created this repo"}, 409)
        else:
            self.add_files(name, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return answer

    def preupload(self, request: Request, repo: Repo, revision: str) -> Any:
        known, files = repo.commits[repo.sha(revision)], []
        for wanted in json.loads(request.body)["files"]:
            path, mode = wanted["path"], "lfs" if is_lfs(wanted["path"], wanted["size"]) else "regular"
            oid = known[path].etag if path in known else None  # lets the client leave out what is unchanged
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def lfs_batch(self, request: Request, repo: Repo) -> Any:
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(request.body)["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self.objects:
                action = {"href": f"{self.url}/lfs/{wanted['oid']}"}
                wanted["actions"] = {"upload": action, "verify": action}
        return {"transfer": "basic", "objects": objects}

    def lfs_upload_or_verify(self, request: Request, oid: str) -> Any:
        if request.method == "PUT":
            self.objects[hashlib.sha256(request.body).hexdigest()] = request.body
        if oid not in self.objects:
            raise Refusal(400, f"The content of {oid} did not arrive")
        return {}

    def commit(self, request: Request, repo: Repo, branch: str) -> Any:
        files = dict(repo.commits[repo.sha(branch)])
        lines = [json.loads(line) for line in request.body.splitlines()]
        for kind, value in ((line["key"], line["value"]) for line in lines[1:]):
            path = value["path"]
            if kind == "file":
                files[path] = File(base64.b64decode(value["content"]), lfs=False)
            elif kind == "lfsFile":
                files[path] = File(self.objects[value["oid"]], lfs=True)
            else:  # a file or a folder
                gone = path.rstrip("/") + "/"
                files = {name: file for name, file in files.items() if not f"{name}/".startswith(gone)}
        sha = repo.commit(branch, files)
        return {"commitOid": sha, "commitUrl": f"{self.url}/{repo.name}/commit/{sha}"}

    def create_reference(self, request: Request, repo: Repo, kind: str, name: str) -> Any:
        wanted = json.loads(request.body)
        references, start = repo.branches, wanted.get("startingPoint", "main")
        if kind == "tag":  # the path ends in the revision to tag
            references, start, name = repo.tags, name, wanted["tag"]
        if name in references:
            raise Refusal(409, f"Reference already exists: {name}")
        references[name] = repo.sha(start)
        return {}

    def tree(self, request: Request, repo: Repo, revision: str, folder: str = "") -> Any:
        prefix, entries, sha = folder and folder + "/", {}, repo.sha(revision)
        for path, file in repo.commits[sha].items():
            if path.startswith(prefix):
                name, slash, _ = path.removeprefix(prefix).partition("/")
                inside = slash and request.query.get("recursive") != "true"
                directory = {"type": "directory", "path": prefix + name, "oid": sha}
                entries[prefix + name if inside else path] = directory if inside else file.entry(path)
        if folder and not entries:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound", sha)
        return list(entries.values())

    def info(self, request: Request, repo: Repo, revision: str = "main") -> Any:
        sha = repo.sha(revision)
        siblings = [file.entry(path) for path, file in repo.commits[sha].items()]
        return {
            "id": re.sub("^(datasets|spaces)/", "", repo.name),
            "sha": sha,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }

    def resolve(self, request: Request, repo: Repo, revision: str, path: str) -> Any:
        sha = repo.sha(revision)
        if (file := repo.commits[sha].get(path)) is None:
            raise Refusal(404, f"Entry not found: {path}", "EntryNotFound", sha)
        size, etag = len(file.content), f'"{file.etag}"'
        linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(size)} if file.lfs else {}
        headers = {"ETag": etag, "X-Repo-Commit": sha} | linked
        start, stop, status = 0, size, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            start, stop, status = int(wanted[1]), min(int(wanted[2] or size) + 1, size), 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        cut = request.method == "GET" and self.failing("cut_download", request)
        return Answer(file.content[start:stop], status, headers, max(0, size // 2 - start) if cut else None)


class Connection(BaseHTTPRequestHandler):
    """HTTP/1.0, one connection per request, so that a stopped Hub has none left open."""

    hub: HubServer

    def handle_request(self) -> None:
        url, headers = urlsplit(self.path), {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, unquote(url.path), dict(parse_qsl(url.query)), headers)
        self.hub.requests.append(request)
        size = int(headers.get("content-length", 0))
        uploads = request.method == "PUT" or (request.method == "POST" and "/commit/" in request.path)
        if uploads and self.hub.failing("cut_upload", request):
            self.rfile.read(size // 2)
            return
        request.body = self.rfile.read(size)
        try:
            if uploads and self.hub.failing("full", request):
                raise Refusal(507, "The storage of this Hub is full")
            content = self.hub.answer(request, url.path)
        except Refusal as refusal:
            content = refusal.answer
        answer = content if isinstance(content, Answer) else Answer(content)
        body = answer.content if isinstance(answer.content, bytes) else json.dumps(answer.content).encode()
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(body))} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if request.method != "HEAD":
            self.wfile.write(body[: answer.cut_at])

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def log_message(self, format: str, *arguments: Any) -> None: ...  # `requests` has it all


def main() -> None:
    """Serve until the standard input ends: `python -m tests.helpers.hub_server HOME` says the variables of a client as JSON."""
    with HubServer() as server:
        print(json.dumps(server.environment(sys.argv[1])), flush=True)
        sys.stdin.read()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


if __name__ == "__main__":
    main()
