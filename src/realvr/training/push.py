"""Upload a model to the hub (``realvr push``): a plain model folder with its card, in one commit. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from realvr.backbone.model_files import check_complete
from realvr.errors import UserError
from realvr.hub.client import LOGIN, api, has_token, reaching
from realvr.models import is_named, locate
from realvr.runs import run_models
from realvr.runs.guard import note
from realvr.runs.hashes import fingerprint
from realvr.training.card import TAG, usage
from realvr.training.records import FINAL, SETTINGS

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

CARD = "README.md"
LATENTS = "diagnose"
"""Where the card of the latents lies, in a run and on the hub."""
_LATENT_CARD = ("card.html", "card.md")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_WEIGHTS = re.compile(r".*\.safetensors|.*\.safetensors\.index\.json|weights\.sha256")
_USE = re.compile(r"^## Use\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class PushSettings:
    """What is uploaded, and where to.

    Args:
        model: Run of realvr train (its final model), a model folder, or the name of a packaged model.
        repo: Repository on the hub, OWNER/NAME. It is made if it does not exist.
        private: Make the repository private. One that exists and is public is refused.
        revision: Branch to commit to, made if it does not exist; main by default.
        also: Files or folders to upload beside the model, such as a report.
        latents: Folder of realvr diagnose ... --card: its card goes along, and the model's card links to it. By
            default the folder diagnose beside the model's, which of a run is RUN/diagnose, where that has a card.
        message: Message of the commit.
        dry_run: Check everything and list the files, without a network.
    """

    model: str
    repo: str
    private: bool = False
    revision: str | None = None
    also: Sequence[Path] = ()
    latents: Path | None = None
    message: str = "Upload with realvr"
    dry_run: bool = False


@dataclass(frozen=True)
class Pushed:
    """What was uploaded."""

    files: dict[str, int]
    """Path in the repository -> bytes."""
    url: str = ""
    """Of the commit; empty after a dry run."""


def push(settings: PushSettings) -> Pushed:
    """Check a model folder, then upload it in one commit."""
    if not _REPO.fullmatch(settings.repo):
        raise UserError(f"{settings.repo}: not a name of the hub; write OWNER/NAME")
    folder = model_folder(settings.model)
    check_complete(folder)
    files = dict(_listed(folder)) | {name: file for path in settings.also for name, file in _beside(Path(path))}
    latents = latent_card(folder, settings.latents)
    files |= {f"{LATENTS}/{file.name}": file for file in latents}
    for file in files.values():
        _refuse_pickle(file)
    text = (hub_card(folder, settings.repo) + _about_latents(latents)).encode()
    sizes = {name: file.stat().st_size for name, file in files.items()} | {CARD: len(text)}
    if settings.dry_run:
        return Pushed(sizes)
    if not has_token():
        raise UserError(f"{settings.repo}: uploading needs a token of the hub: {LOGIN}")
    return Pushed(sizes, _upload(settings, files | {CARD: text}))


def model_folder(model: str) -> Path:
    """The model folder that a run, a folder or a packaged name stands for."""
    if is_named(model):
        return Path(locate(model))
    folder = Path(model)
    if not folder.is_dir():
        raise UserError(f"{model} is no folder here: name a run, a model folder or a packaged model")
    if (folder / "config.json").is_file():
        return folder
    if (folder / FINAL).is_dir():
        return folder / FINAL
    if (folder / SETTINGS).is_file():
        raise UserError(run_models.unfinished(folder))
    is_state = any(folder.glob("rank-*.json"))
    more = "; a checkpoint of a run is its state, not a model: name the run" if is_state else ""
    raise UserError(f"{model} has no config.json: it is neither a model folder nor a run{more}")


def latent_card(folder: Path, named: Path | None) -> list[Path]:
    """The files of the card of its latents, the figures that it links to among them; empty where there is none. A card
    of other weights is refused where it was named, and left out with a notice where it was found."""
    place = folder.parent / LATENTS if named is None else Path(named)
    found = [place / name for name in _LATENT_CARD]
    if not all(file.is_file() for file in found):
        if named is not None:
            raise UserError(
                f"--latents {named}: no card in it; realvr diagnose MODEL ... --out {named} --card writes it"
            )
        return []
    text = found[1].read_text(encoding="utf-8", errors="replace")
    made = re.search(r"^\| fingerprint of the weights \| ([0-9a-f]{64}) \|$", text, re.MULTILINE)
    if made and made[1] != fingerprint(folder):
        why = f"{found[1]} is the card of other weights than those of {folder}"
        if named is not None:
            raise UserError(f"--latents {named}: {why}; realvr diagnose {folder} ... --card makes another")
        note(f"{why} and is left out")
        return []
    figures = [place / name for name in re.findall(r"^!\[.*\]\(([\w.-]+\.svg)\)$", text, re.MULTILINE)]
    return [*found, *(file for file in figures if file.is_file())]


def _about_latents(files: Sequence[Path]) -> str:
    """The section of the model's card that leads to that of its latents."""
    if not files:
        return ""
    text = files[1].read_text(encoding="utf-8", errors="replace")
    said = re.search(r"^\*\*Verdict:\*\* .*$", text, re.MULTILINE)
    return f"\n## Latents\n\n{said[0] if said else ''}\n\n[Card of the latents]({LATENTS}/{_LATENT_CARD[1]})\n"


def _listed(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder and their paths in it, hidden ones left out."""
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder)
        if file.is_file() and not any(part.startswith(".") for part in inner.parts):
            yield inner.as_posix(), file


def _beside(path: Path) -> Iterator[tuple[str, Path]]:
    """What ``also`` names, under its own name."""
    if not path.exists():
        raise UserError(f"--also {path}: no such file or folder")
    name = path.resolve().name
    return iter([(name, path)]) if path.is_file() else ((f"{name}/{inner}", file) for inner, file in _listed(path))


def _refuse_pickle(file: Path) -> None:
    """Pickles run code on the machine of whoever opens them."""
    with file.open("rb") as source:
        start = source.read(2)
    if file.suffix.lower() in _PICKLES or (start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        raise UserError(f"{file} is, or may hold, a pickle, which runs code when it is opened: move it away")


def hub_card(folder: Path, repo: str) -> str:
    """The card of a model folder as it should read on the hub: used by the name of the repository, and based on
    another model only if that is on the hub. A folder without a card gets a short one."""
    file = folder / CARD
    text = file.read_text(encoding="utf-8") if file.is_file() else f"# {repo.partition('/')[2]}\n\n{usage(repo)}\n"
    text = _USE.sub(lambda _: usage(repo) + "\n\n", text, count=1)
    found = re.match(r"---\n(.*?\n)---\n", text, re.DOTALL)
    try:
        front: Any = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError as error:
        raise UserError(f"{file}: the lines between --- are not YAML ({' '.join(str(error).split())[:120]})") from None
    front = front if isinstance(front, dict) else {}
    base = str(front.get("base_model", ""))
    if not _REPO.fullmatch(base) or Path(base).exists():
        front.pop("base_model", None)
    tags = front.get("tags")
    front = {"library_name": "transformers"} | front | {"tags": list(dict.fromkeys([*(tags or []), TAG]))}
    body = text[found.end() :] if found else text
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n{body}".rstrip() + "\n"


def _upload(settings: PushSettings, files: dict[str, Path | bytes]) -> str:
    """One commit with all files; weights of an earlier one that are no longer there are removed. Its address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants

    repo, revision, client = settings.repo, settings.revision or "main", api()
    with reaching(repo, f"{constants.ENDPOINT}/{repo}", "push again where there is one; --dry-run needs none"):
        client.create_repo(repo, private=settings.private or None, exist_ok=True)
        if settings.private and not client.repo_info(repo).private:
            raise UserError(f"{repo} exists and is public: make it private in its settings, or leave out --private")
        if settings.revision:
            client.create_branch(repo, branch=revision, exist_ok=True)
        changes: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, file) for name, file in files.items()
        ]
        changes += [CommitOperationDelete(name) for name in _stale(client, repo, revision, files)]
        done = client.create_commit(repo, changes, commit_message=settings.message, revision=revision)
    return str(done.commit_url)


def _stale(client: HfApi, repo: str, revision: str, files: dict[str, Path | bytes]) -> list[str]:
    """Weights in the repository that this model does not have: loaders would take them for its own."""
    there = client.list_repo_files(repo, revision=revision)
    return [name for name in there if name not in files and _WEIGHTS.fullmatch(name)]
