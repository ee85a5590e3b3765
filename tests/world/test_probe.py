"""A small network learns to see the easy world within minutes on a CPU (the whole probe needs a GPU)."""

import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import realvr
from realvr.world.phrasing import PHRASINGS, phrase
from realvr.world.queries import EXTREMES, SIDES, Description, Query
from realvr.world.words import COLORS, REGIONS, SHAPES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "world_probe.py"


@pytest.mark.slow
def test_the_easy_world_can_be_seen_by_a_small_network():
    environment = os.environ | {"PYTHONPATH": str(Path(realvr.__file__).parents[1]), "COLUMNS": "160"}
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu", "--workers", "1"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    seen = [float(number) for number in re.findall(r"^│ easy .* ([\d.]+) +│$", done.stdout, re.M)]
    assert len(seen) == 2 and min(seen) > 60, done.stdout


def test_the_probe_knows_every_word_of_the_full_world(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    probe = importlib.import_module("world_probe")
    told = {word for kind in PHRASINGS for query in _queries(kind) for word in probe.words_of(phrase(query, 0))}
    assert {"bottommost", "crosses"} <= told and told <= set(probe.IDS)


def _queries(kind):
    """Queries of a kind with every word they can hold."""
    for shape, color in itertools.product(SHAPES, COLORS):
        a, b = Description("small", "striped", color, shape), Description("large", "dotted", color, shape)
        yield from (Query(kind, a, b, place) for place in (*EXTREMES, *SIDES, *REGIONS))
