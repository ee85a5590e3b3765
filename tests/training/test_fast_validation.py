"""``fast_decode`` of a Stage-2 run: its validations decode in static shapes too, and its steps say how they ran."""

from __future__ import annotations

import json
from pathlib import Path

from realvr.latent.fast import COUNTS
from realvr.latent.recorded_span import COUNTS as SPAN_COUNTS
from realvr.training import loop
from realvr.training.validation import validation_of
from stage_runs import configure, lines, make, world, write


def test_a_run_in_static_shapes(tmp_path: Path) -> None:
    data, held = write(world(4), tmp_path / "data"), write(world(6, seed=5, size=48), tmp_path / "held")
    replies, metrics, ways = [], [], []
    for mode in ("off", "static"):
        raw = configure("rl", Path("mini"), data, tmp_path / mode, optim={"steps": 2, "lr": 1e-4}, fast_decode=mode)
        raw["recorded_span"] = mode == "static"
        raw["model"] |= {"path": "mini", "latents": 8}
        raw["validation"] = {"path": str(held), "every": 2, "batch": 4, "max_new": 24}
        task, settings, engine = make("rl", raw)
        assert loop.train(task, settings, engine) == 0
        found = [json.loads(line) for line in (tmp_path / mode / "validation.jsonl").read_text().splitlines()]
        replies.append([{name: value for name, value in row.items() if isinstance(value, str)} for row in found])
        metrics.append(lines(tmp_path / mode))
        checked = validation_of(task, settings, engine)
        assert checked is not None
        ways.append(checked._fast())
    assert len(replies[0]) >= 6 and replies[0] == replies[1]
    assert ways[0] is None and ways[1] is not None and ways[1] is not task.rollouts.fast
    plain, static = metrics
    assert not any(name.startswith(("decode/", "span/")) for line in plain for name in line)
    for line, other in zip(static, plain, strict=True):
        assert {f"decode/{name}" for name in COUNTS} <= set(line)
        assert line["decode/eager"] > 8 and line["decode/plain"] == 0
        assert line["reward"] == other["reward"]
        assert {f"span/{name}" for name in SPAN_COUNTS} <= set(line)
    assert [line["span/plain"] > 0 for line in static] == [False, True]  # no GPU here; those of the step before
    assert sum(line["decode/eager"] for line in static) == task.rollouts.fast.counts["eager"]
