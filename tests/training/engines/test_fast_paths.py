"""What ``auto`` switches on under DDP, on two real ranks, beside one process without it.

In float64, with stand-ins for CUDA graphs and for the GPU that leaves threads their time (`fast_stage_two.py`). Both
runs have fused layers: stock norms compute in float32, which would be all that is seen. They are compared elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stage_runs
from engine_runs import LORA, STAGE_TWO, assert_ranks, assert_rewarded, assert_same_model, assert_same_steps, train
from stage_runs import column, configure, lines

PLUGIN = Path(__file__).with_name("fast_stage_two.py")
FAST = {"type": "fast-rl", "split_attention": True, "recorded_span": True}
PLAIN = {"type": "realvr", "split_attention": False, "recorded_span": True}
"""Without a GPU spans are not recorded, but counted: both runs then have the same metrics."""
COUNTS = tuple(f"span/{name}" for name in ("recorded", "replayed", "plain", "dropped"))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_ranks_train_what_one_plain_process_trains(
    lora: dict[str, Any] | None, dense: Path, eight: Path, tmp_path: Path
) -> None:
    """Losses, norms, rewards and the model, after steps on prompts that were prepared and spans that were repeated from
    a recording, with two updates on each batch of rollouts."""
    one, two = tmp_path / "one", tmp_path / "two"
    changes = STAGE_TWO | {"memory": "checkpointed-prefill", "updates_per_rollout": 2, "run": {"seed": 30}}
    changes |= {"optim": STAGE_TWO["optim"] | {"steps": 6}, "model": {"dtype": "float64", "fused_layers": True}}
    changes |= {"lora": lora} if lora else {}
    train("rl", configure("rl", dense, eight, two, method=FAST, **changes), "--plugin", str(PLUGIN))
    with pytest.warns(UserWarning, match="recorded span: CUDA graphs need a CUDA device"):
        stage_runs.run("rl", configure("rl", dense, eight, one, method=PLAIN, **changes))
    assert_ranks(two, 2, "MULTI_CPU", "DistributedDataParallel")
    assert_same_steps(one, two, rel=1e-6, abs=1e-9, without=COUNTS)  # metrics have 32 bits
    assert_same_model(one, two, dense, tolerance=1e-9)
    assert_rewarded(one)
    spans = {name: sum(line.get(name, 0) for line in lines(two)) for name in COUNTS}
    assert spans["span/replayed"] > spans["span/recorded"] > 0 == spans["span/plain"], spans
    assert max(abs(loss) for loss in column(lines(two), "loss/policy")) > 1e-3
    for rank in range(2):
        assert lines(tmp_path, f"two.prepared-{rank}.jsonl") == [0, 2, 2, 2, 2, 0]
