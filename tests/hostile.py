"""Ways to spoil a JSON file: cut, filled with noise, or one value of it replaced by something it should not be."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    {"": None},
    float("nan"),
)


def spoil(path: Path, rng: random.Random) -> str:
    """Change the file in place; returns how."""
    data = path.read_bytes()
    how = rng.choice(("cut", "empty", "noise", "deep", "latin", "value", "value", "value", "value", "gone key"))
    if not data:
        how = "deep"
    if how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(bytes(rng.randrange(256) for _ in range(300)))
    elif how == "deep":
        path.write_bytes(b"[" * 200_000 + b"\n")
    elif how == "latin":
        place = rng.randrange(len(data))
        path.write_bytes(data[:place] + b"\xe9" + data[place:])
    else:
        return _value(path, data, rng, how)
    return how


def _value(path: Path, data: bytes, rng: random.Random, how: str) -> str:
    lines = path.suffix == ".jsonl"
    if path.suffix not in (".json", ".jsonl"):
        path.write_bytes(b"- [}\n" + data)
        return "not YAML"
    parts = data.decode().splitlines() if lines else [data.decode()]
    if not parts:
        return "nothing"
    number = rng.randrange(len(parts))
    tree = {"root": json.loads(parts[number])}
    spots: list[tuple[Any, Any]] = [(tree, "root")]
    _spots(tree["root"], spots)
    holder, key = rng.choice(spots)
    before = f"line {number} {key!r}"
    if how == "gone key" and isinstance(holder, dict) and holder is not tree:
        del holder[key]
        what = "removed"
    else:
        holder[key] = rng.choice(VALUES)
        what = f"-> {str(holder[key])[:20]!r}"
    parts[number] = json.dumps(tree["root"])
    path.write_text("\n".join(parts) + "\n", encoding="utf-8", errors="surrogatepass")
    return f"{before} {what}"


def _spots(value: Any, found: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:60]:
        found.append((value, key))
        _spots(item, found)
