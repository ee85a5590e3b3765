"""A small stage that learns a regression, and a process that trains it: what the tests of the loop run.

Run as ``python training_task.py '{"out": ..., ...}'``, alone or under a launcher.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from realvr.errors import UserError
from realvr.training.engine import Engine, start_engine
from realvr.training.loop import train
from realvr.training.settings import TrainSettings
from realvr.training.task import Collected, Metrics


@dataclass
class Options:
    """What a test wants of the stage and the run."""

    out: str
    steps: int = 12
    batch: int = 8
    microbatch: int = 2
    seed: int = 0
    noise: bool = False
    """Draw from the process-wide generators in every step, so that resuming has to restore them."""
    kill: str = ""
    """Where the process kills itself: forward, prepare, save."""
    kill_step: int = -1
    bad: dict[str, str] = field(default_factory=dict)
    """Step to what goes wrong there: loss (NaN on the last rank), gradient (infinite)."""
    slow: float = 0.0
    """Seconds a step takes at least."""
    width: int = 16
    dtype: str = "float64"
    settings: dict[str, Any] = field(default_factory=dict)


class Module(nn.Module):
    """The whole differentiable step: a two-layer network, with a loss of two parts."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.options, self.step = options, 0
        self.net = nn.Sequential(
            nn.Linear(4, options.width), nn.LayerNorm(options.width), nn.Tanh(), nn.Linear(options.width, 1)
        ).to(getattr(torch, options.dtype))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.dropout = nn.Dropout(0.1 if options.noise else 0.0)

    def forward(self, microbatch: dict[str, Any], term: str | None = None) -> tuple[Tensor, Metrics]:
        if term is None:
            self.calls += 1
        if self.options.kill == "forward" and self.step == self.options.kill_step and microbatch["index"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        predicted = self.net(self.dropout(microbatch["x"])).squeeze(-1)
        terms = {"fit": (predicted - microbatch["y"]).square(), "size": 0.1 * predicted.square()}
        loss = sum((value.sum() for name, value in terms.items() if term in (None, name)), torch.zeros(()))
        loss = loss / microbatch["normaliser"]
        problem = self.options.bad.get(str(self.step))
        if problem == "loss" and microbatch["hurt"]:
            loss = loss * float("nan")
        elif problem == "gradient":
            loss = loss + (self.net[3].bias * 0).sqrt().sum()  # finite, with an infinite derivative
        count = torch.tensor(float(len(predicted)))
        return loss, {"error": (terms["fit"].detach().sum(), count), "tokens": (count * 4, count)}


class RegressionTask:
    """Examples made from their number; each rank takes every world-th of a step's."""

    term_names = ("fit", "size")

    def __init__(self, options: Options, engine: Engine) -> None:
        self.options, self.engine = options, engine
        self.module = Module(options)
        self.position = 0
        self.bank = torch.zeros(0, dtype=torch.float64)

    def collect(self, step: int) -> Collected:
        options, engine = self.options, self.engine
        time.sleep(options.slow)
        if options.kill == "prepare" and step == options.kill_step:
            os.kill(os.getpid(), signal.SIGKILL)
        assert self.position == step * options.batch, "the data position was not restored"
        self.module.step = step
        own = list(range(self.position, self.position + options.batch))[engine.rank :: engine.world]
        self.position += options.batch
        x, y = (
            torch.stack(column).to(getattr(torch, options.dtype)) for column in zip(*map(example, own), strict=True)
        )
        if options.noise:
            y = y + 0.1 * torch.randn(()) + self.bank.sum() * 1e-3
        self.bank = torch.cat([self.bank, y[:1].double()])[-5:]
        cuts = range(0, len(own), options.microbatch)
        batches = [
            {
                "index": number,
                "names": [f"row-{i}" for i in own[cut : cut + options.microbatch]],
                "x": x[cut : cut + options.microbatch],
                "y": y[cut : cut + options.microbatch],
                "normaliser": options.batch,
                "hurt": engine.rank == engine.world - 1 and number == 1,
            }
            for number, cut in enumerate(cuts)
        ]
        rows = [{"id": f"row-{own[0]}", "completion": "[bold] not markup", "reward": float(y[0])}]
        metrics = {"reward": (y.sum(), torch.tensor(float(len(own))))}
        return Collected(batches, metrics, rows)

    def after_update(self) -> None:
        self.module.updates += 1

    def state_dict(self) -> dict[str, Any]:
        if self.options.kill == "save" and self.module.step + 1 == self.options.kill_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"position": self.position, "bank": self.bank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.bank = state["position"], state["bank"]

    def redistribute(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return states[0]

    def export(self, directory: Path) -> None:
        save_file(self.module.net.state_dict(), directory / "model.safetensors")

    def about(self) -> None:
        return None

    def close(self) -> None:
        pass


def example(number: int) -> tuple[Tensor, Tensor]:
    """Inputs (4,) and target of one example."""
    x = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return x, (x[0] * x[1]).tanh() + x[2]


def make_settings(options: Options) -> TrainSettings:
    """Settings of a run that suit the stage."""
    base: dict[str, Any] = {
        "model": {"path": "none", "dtype": "float64"},
        "data": {"sources": [{"path": "none"}]},
        "run": {"out": options.out, "seed": options.seed, "max_bad_steps": 2},
        "optim": {"lr": 0.02, "steps": options.steps, "batch": options.batch, "microbatch": options.microbatch},
        "checkpoint": {"every": 4},
        "log": {"tensorboard": False, "console": False, "parts_every": 0, "table_every": 5},
    }
    for section, values in options.settings.items():
        base[section] |= values
    return TrainSettings.model_validate(base)


def run(engine: Engine | None = None, **given: Any) -> int:
    """Train in this process."""
    options = Options(**given)
    engine = engine or start_engine(cpu=True)
    return train(RegressionTask(options, engine), make_settings(options), engine)


def main() -> int:
    torch.set_num_threads(1)
    options = Options(**json.loads(sys.argv[1]))
    engine = start_engine(cpu=True)
    task = RegressionTask(options, engine)
    try:
        code = train(task, make_settings(options), engine)
    except UserError as error:
        print(f"realvr: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    facts = {"world": engine.world, "rank": engine.rank, "wrapped": type(engine.wrapped).__name__}
    facts["weights"] = [p.detach().flatten().tolist() for p in engine.trainable()]
    (Path(options.out) / f"facts-{engine.rank}.json").write_text(json.dumps(facts))
    return engine.exit(code)


if __name__ == "__main__":
    sys.exit(main())
