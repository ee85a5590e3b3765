"""A hub on this machine: an HTTP server with the endpoints that ``huggingface_hub`` calls, for models and datasets.

It keeps what the hub keeps: blobs by their hash, commits as lists of paths, branches as names of commits. Large files
go through the LFS batch endpoint. Private and gated repositories answer as the real ones do, with the error codes that
the client tells apart. Nothing of realvr is used here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_standin"
OWNER = "tester"
LFS_ABOVE = 1024
"""Larger files are stored by their SHA-256, as the hub does from 10 MB on."""


@dataclass
class Repo:
    """A repository: commits by hash, each with the blobs of its paths."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, str]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, str]) -> str:
        sha = hashlib.sha1(json.dumps([branch, len(self.commits), files], sort_keys=True).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


class Hub:
    """What the server knows. ``asked`` lists (method, path) of every request."""

    def __init__(self, root: Path) -> None:
        self.blobs = root / "blobs"
        self.blobs.mkdir(parents=True)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    def store(self, data: bytes) -> str:
        large = len(data) > LFS_ABOVE
        name = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (self.blobs / name).write_bytes(data)
        return name

    def add(self, kind: str, name: str, files: dict[str, bytes], branch: str = "main", **flags: bool) -> str:
        """Put a repository here, or a further commit of it; the hash of the commit."""
        repo = self.repos.setdefault((kind, name), Repo(**flags))
        return repo.commit(branch, {path: self.store(data) for path, data in files.items()})

    def files(self, kind: str, name: str, branch: str = "main") -> dict[str, bytes]:
        repo = self.repos[kind, name]
        return {path: (self.blobs / oid).read_bytes() for path, oid in repo.commits[repo.branches[branch]].items()}

    def served(self, path: str) -> int:
        """How often the bytes of a file were asked for."""
        return sum(
            method == "GET" and asked.endswith(f"/{path}") and "/resolve/" in asked for method, asked in self.asked
        )


class Refused(Exception):
    """An answer that is an error, with the code by which the client knows it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def route(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        path = unquote(address.path)
        self.hub.asked.append((self.command, path))
        try:
            self.dispatch(path, parse_qs(address.query), body)
        except Refused as refused:
            text = json.dumps({"error": str(refused)}).encode()
            self.answer(refused.status, text, {"X-Error-Code": refused.code, "X-Error-Message": str(refused)})

    do_GET = do_HEAD = do_POST = do_PUT = route

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def must_be_known(self) -> None:
        if not self.known:
            raise Refused(401, "", "Invalid username or password.")

    def repo(self, kind: str, name: str) -> Repo:
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and not self.known):
            raise Refused(404 if self.known else 401, "RepoNotFound", "Repository not found")
        return repo

    def revision(self, repo: Repo, revision: str) -> str:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def dispatch(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if path == "/api/whoami-v2":
            self.must_be_known()
            return self.json({"type": "user", "name": OWNER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            return self.lfs(found[1], body)
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body))
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve("dataset" if found[1] else "model", found[2], found[3], found[4])
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/([^/]+)(?:/(.*))?)?)?", path):
            kind, name, verb, revision, inner = found.groups()
            return self.api(kind, name, verb or "revision", revision or "main", inner or "", query, body)
        raise Refused(404, "", f"no such endpoint here: {self.command} {path}")

    def create(self, asked: dict[str, Any]) -> None:
        self.must_be_known()
        kind, name = asked.get("type") or "model", f"{asked.get('organization') or OWNER}/{asked['name']}"
        if not name.startswith(f"{OWNER}/"):
            raise Refused(403, "", f"You don't have the rights to create a {kind} under the namespace")
        address = f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.hub.repos:
            return self.json({"error": "You already created this repo", "url": address}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        repo = self.hub.repos[kind, name] = Repo(private=private)
        repo.commit("main", {})
        return self.json({"url": address, "name": name, "id": name})

    def api(self, kind: str, name: str, verb: str, revision: str, inner: str, query: Any, body: bytes) -> None:
        repo = self.repo(kind, name)
        if verb == "branch":
            self.must_be_known()
            if revision in repo.branches:
                raise Refused(409, "", "Reference already exists")
            repo.branches[revision] = repo.branches["main"]
            return self.json({})
        sha = self.revision(repo, revision)
        files = repo.commits[sha]
        if verb == "revision":
            siblings = [{"rfilename": path} for path in files]
            facts = {"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []}
            return self.json(facts | {"gated": "auto" if repo.gated else False, "downloads": 0, "likes": 0})
        if verb == "tree":
            return self.json([self.entry(path, oid) for path, oid in files.items() if path.startswith(inner)])
        if verb == "paths-info":
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode()).get("paths", [])
            return self.json([self.entry(path, oid) for path, oid in files.items() if path in wanted])
        self.must_be_known()
        if verb == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if f["size"] > LFS_ABOVE else "regular"} for f in asked]
            return self.json({"files": [mode | {"shouldIgnore": False} for mode in modes]})
        if verb == "commit":
            return self.commit(repo, name, revision, [json.loads(line) for line in body.splitlines()])
        raise Refused(404, "", f"no such endpoint here: {verb}")

    def entry(self, path: str, oid: str) -> dict[str, Any]:
        size = (self.hub.blobs / oid).stat().st_size
        lfs = {"oid": oid, "size": size, "pointerSize": 130}
        return {"type": "file", "path": path, "size": size, "oid": oid[:40]} | ({"lfs": lfs} if len(oid) == 64 else {})

    def commit(self, repo: Repo, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        files = dict(repo.commits[self.revision(repo, branch)])
        assert lines[0]["key"] == "header" and lines[0]["value"]["summary"]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = self.hub.store(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if not (self.hub.blobs / value["oid"]).is_file():
                    raise Refused(400, "", f"the content of {value['path']} was never uploaded")
                files[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, "", f"unknown operation {line['key']}")
        sha = repo.commit(branch, files)
        self.json({"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "hookOutput": ""})

    def batch(self, asked: dict[str, Any]) -> None:
        self.must_be_known()
        assert asked["operation"] == "upload" and asked["hash_algo"] == "sha256"
        objects = []
        for item in asked["objects"]:
            there = (self.hub.blobs / item["oid"]).is_file()
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}}
            objects.append({"oid": item["oid"], "size": item["size"]} | ({} if there else {"actions": upload}))
        self.json({"transfer": "basic", "objects": objects})

    def lfs(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "", "the content does not have the hash it was announced with")
        (self.hub.blobs / oid).write_bytes(body)
        self.answer(200)

    def resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        repo = self.repo(kind, name)
        if repo.gated and not self.known:
            raise Refused(401, "GatedRepo", f"Access to {kind} {name} is restricted.")
        sha = self.revision(repo, revision)
        if path not in repo.commits[sha]:
            raise Refused(404, "EntryNotFound", "Entry not found")
        oid = repo.commits[sha][path]
        data = (self.hub.blobs / oid).read_bytes()
        headers = {
            "X-Repo-Commit": sha,
            "ETag": f'"{oid}"',
            "X-Linked-Etag": f'"{oid}"',
            "X-Linked-Size": str(len(data)),
        }
        headers["Accept-Ranges"] = "bytes"
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(found[1]), min(int(found[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.answer(206, data[start : end + 1], headers)
        return self.answer(200, data, headers)


@contextmanager
def standin(root: Path) -> Iterator[Hub]:
    """A hub on a free port, until the block ends."""
    hub = Hub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def client(hub: Hub, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    """Environment of a process that knows this hub only, with a cache of its own."""
    found = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return found | ({"HF_TOKEN": token} if token else {"HF_TOKEN": "", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})
