"""Why passes with gradient take as long as they do on a GPU: kernels, time that the device is busy, host operations.

    python benchmarks/pass_profile.py          (7B shape, one prompt, `cached`: full parameters, then LoRA 16)
    python benchmarks/pass_profile.py --ranks 16 --microbatch 4 --memory checkpointed-prefill
    python benchmarks/pass_profile.py --device cpu --preset tiny        (tries the script out: no kernels)

LVR-RL and ReaLVR, one microbatch of Stage 2. It runs a profiler: nothing should be timed after it in the same process.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from kernel_profile import host, kernels
from realvr.zoo.presets import PRESETS
from speed_kit import Bench, Results, about, quiet
from speed_options import parse_options
from speed_passes import TrainPass, cut
from speed_sizes import FULL, MODES, SMALL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="Qwen2.5-VL-7B", choices=[*PRESETS, "tiny"])
    parser.add_argument("--ranks", default="0,16", help="of LoRA, with commas between them; 0 trains all parameters")
    parser.add_argument("--microbatch", type=int, default=1, help="prompts")
    parser.add_argument("--memory", default="cached", choices=MODES)
    parser.add_argument("--options", default="fast", help="plain, default, fast, or changes of one")
    parser.add_argument("--minutes", type=float, default=10.0, help="nothing new is begun after that")
    args = parser.parse_args()
    quiet()
    device, small = torch.device(args.device), args.preset == "tiny"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = replace(SMALL if small else FULL, prompts=args.microbatch)
    preset = "tiny:qwen2.5-vl" if small else args.preset
    head = about(sizes, preset, device, dtype, 1)
    results = Results(Path("profile.json"), head, resume=False)  # not written
    bench = Bench(preset, device, dtype, sizes, 1, time.monotonic() + 60 * args.minutes, results)
    bench.options = parse_options(args.options, device)
    print(f"{head['gpu'] or head['cpu']}, {preset}, commit {head['commit']}, options {args.options}")
    for rank in (int(text) for text in args.ranks.split(",")):
        bench.drop()
        batches = cut(bench, args.microbatch, args.microbatch, rank)
        for evidence in (False, True):
            bench.in_time()
            bench.clear()
            run = TrainPass(bench, batches, args.memory, evidence, rank)
            where = f"{args.microbatch} prompts, {args.memory}, " + (f"LoRA {rank}" if rank else "full parameters")
            name = f"{'ReaLVR' if evidence else 'LVR-RL'}, {where}"
            run()  # records what is to be recorded
            lines = kernels(name, run) if device.type == "cuda" else []
            print("\n".join([*lines, *host(name, run)]), flush=True)


if __name__ == "__main__":
    main()
