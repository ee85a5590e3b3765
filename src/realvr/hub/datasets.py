"""Datasets of the hub by name, ``hf:OWNER/NAME@REVISION#SPLIT``: which files a split has, fetched one at a time.

A file is downloaded when its first row is asked for, into the cache of ``huggingface_hub``, and is from then on a file
like any other. The revision is looked up once in a process, so that all files are of one commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, overload

import yaml

from realvr.errors import UserError
from realvr.hub.client import api, reaching

PREFIX = "hf:"
DATA = (".parquet", ".jsonl", ".json", ".tsv")
"""Suffixes of data files; where a split has several kinds, the first of them is read."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_NOT_DATA = ("dataset_infos.json", "dataset_info.json", "state.json")
_NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^#@]+))?(?:#(?P<split>[^#]+))?")
_NUMBERED = re.compile(r"(.+)-\d+-of-\d+")


def is_hub(path: str | Path) -> bool:
    """Whether a path is the name of a dataset on the hub."""
    return str(path).startswith(PREFIX)


@dataclass(frozen=True)
class HubSplit:
    """The files of one split, at one commit."""

    name: str
    repo: str
    commit: str
    files: tuple[str, ...]
    """Paths in the repository, in order."""
    pictures: bool
    """Whether the repository holds image files, which rows may name."""

    def fetch(self, path: str) -> Path:
        """A file of the repository on this machine; downloaded where the cache lacks it."""
        with _reaching(self.name, self.repo):
            return Path(api().hf_hub_download(self.repo, path, repo_type="dataset", revision=self.commit))

    def fetch_pictures(self) -> None:
        """The image files of the repository, beside the data files that name them."""
        patterns = [f"*{suffix}" for low in PICTURES for suffix in (low, low.upper())]
        with _reaching(self.name, self.repo):
            api().snapshot_download(self.repo, repo_type="dataset", revision=self.commit, allow_patterns=patterns)


class HubFiles(Sequence[Path]):
    """The data files of a split; each is fetched when it is taken, with the pictures it may name."""

    def __init__(self, split: HubSplit, pictures: bool = True) -> None:
        self.split = split
        self._pictures = pictures and split.pictures
        """Still to be fetched."""

    def __len__(self) -> int:
        return len(self.split.files)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | Sequence[Path]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        path = self.split.files[index]
        if self._pictures and PurePosixPath(path).suffix.lower() in (".json", ".jsonl"):
            self.split.fetch_pictures()
            self._pictures = False
        return self.split.fetch(path)


@cache
def find(text: str) -> HubSplit:
    """The split that ``hf:OWNER/NAME@REVISION#SPLIT`` names; refused with what there is where it does not exist."""
    parsed = _NAME.fullmatch(text)
    if parsed is None:
        raise UserError(f"{text}: write hf:OWNER/NAME#SPLIT, with a revision hf:OWNER/NAME@REVISION#SPLIT")
    repo, split = parsed["repo"], parsed["split"]
    with _reaching(text, repo):
        info = api().dataset_info(repo, revision=parsed["revision"])
        paths = sorted(sibling.rfilename for sibling in info.siblings or [])
        front: dict[str, Any] = {}
        if "README.md" in paths:
            card = api().hf_hub_download(repo, "README.md", repo_type="dataset", revision=info.sha)
            front = _front(Path(card).read_text(encoding="utf-8", errors="replace"))
    splits = _listed(front, paths) or _by_name(paths)
    if not splits:
        raise UserError(f"{text}: the dataset has no data files ({', '.join(DATA)}); download what it has by hand")
    chosen = _chosen(text, split, splits)
    kind = next(suffix for suffix in DATA if any(path.lower().endswith(suffix) for path in chosen))
    files = tuple(path for path in chosen if path.lower().endswith(kind))
    return HubSplit(text, repo, str(info.sha), files, any(path.lower().endswith(PICTURES) for path in paths))


def _reaching(text: str, repo: str) -> AbstractContextManager[None]:
    from huggingface_hub import constants

    instead = f"where there is one run `hf download --repo-type dataset {repo}` and name the file it wrote"
    return reaching(text, f"{constants.ENDPOINT}/datasets/{repo}", instead)


Splits = dict[tuple[str, str], list[str]]
"""(configuration, split) -> paths."""


def _chosen(text: str, split: str | None, splits: Splits) -> list[str]:
    """The paths of a split: ``SPLIT`` in every configuration, ``CONFIGURATION/SPLIT`` in one."""
    names = list(dict.fromkeys(name for _, name in splits))
    if split is None and len(names) == 1:
        split = names[0]
    found = [paths for (config, name), paths in splits.items() if split in (name, f"{config}/{name}")]
    if found:
        return list(dict.fromkeys(path for paths in found for path in paths))
    configs = list(dict.fromkeys(config for config, _ in splits if config))
    more = f"; one configuration: #CONFIGURATION/SPLIT of {', '.join(configs[:12])}" if len(configs) > 1 else ""
    wrong = "name a split" if split is None else f"there is no split {split!r}"
    raise UserError(f"{text}: {wrong}; there are {', '.join(f'#{name}' for name in names)}{more}")


def _front(card: str) -> dict[str, Any]:
    """The YAML at the top of a card; empty where there is none."""
    try:
        _, front, _ = card.split("---\n", 2)
        found = yaml.safe_load(front)
    except (ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(front: dict[str, Any], paths: Sequence[str]) -> Splits:
    """What the card says about configurations and their splits."""
    splits: Splits = {}
    configs = front.get("configs")
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        listed = config.get("data_files")
        entries = listed if isinstance(listed, list) else [listed]
        for entry in entries:
            split, patterns = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
            wanted = [pattern for pattern in (patterns if isinstance(patterns, list) else [patterns]) if pattern]
            found = [path for path in _data(paths) if any(fnmatchcase(path, str(pattern)) for pattern in wanted)]
            if found and split:
                splits.setdefault((str(config.get("config_name") or ""), str(split)), []).extend(found)
    return splits


def _data(paths: Iterable[str]) -> list[str]:
    names = [path for path in paths if PurePosixPath(path).name not in _NOT_DATA]
    return [path for path in names if path.lower().endswith(DATA) and not path.startswith(".")]


def _by_name(paths: Sequence[str]) -> Splits:
    """Splits by the names of files, as the hub finds them: ``data/train-00000-of-00002.parquet``, ``train.jsonl``,
    ``train/part.jsonl``; the folder above is the configuration."""
    splits: Splits = {}
    for path in _data(paths):
        parts = [part for part in PurePosixPath(path).parts[:-1] if part != "data"]
        stem = PurePosixPath(path).stem
        if numbered := _NUMBERED.fullmatch(stem):
            key = ("/".join(parts), numbered[1])
        elif parts:
            key = ("/".join(parts[:-1]), parts[-1])
        else:
            key = ("", stem)
        splits.setdefault(key, []).append(path)
    return splits
