#!/usr/bin/env bash
# Train a mini base of each family named (default: all five) side by side on one GPU, then print their accuracy.
#   PYTHON=python3 STEPS=2000 LIMIT=540 scripts/mini_train.sh internvl3 gemma3
# A second call continues what is unfinished. Everything goes under runs/mini.
set -euo pipefail
PYTHON=${PYTHON:-python3} STEPS=${STEPS:-2000} LIMIT=${LIMIT:-540} SEED=${SEED:-0} WORKERS=${WORKERS:-14}
families=("${@:-internvl3 gemma3 qwen2.5-vl qwen3-vl qwen3-vl-moe}")
read -ra families <<<"${families[*]}"
kinds="color shape at_color at_shape position exist count relation_x relation_y holds extreme_color extreme_shape"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
make_world() { # split count
  [ -d "runs/mini/world/$1" ] || $PYTHON -m realvr world make runs/mini/world --split "$1" --count "$2" --kinds $kinds \
    --format jsonl --workers "$WORKERS"
}
make_world curriculum 60000
make_world dialogues 6000
make_world sequels 10000
for family in "${families[@]}"; do
  out=runs/mini/$family
  mkdir -p "$out"
  (
    [ -d "$out/new" ] || $PYTHON -m realvr new "$out/new" --family "$family" --size mini --seed "$SEED"
    timeout -s INT "$LIMIT" $PYTHON -m realvr train base configs/mini/base.yaml --model.path "$out/new" \
      --run.out "$out/base" --run.seed "$SEED" --optim.steps "$STEPS"
  ) >"$out/base.log" 2>&1 &
done
wait || true
for family in "${families[@]}"; do
  echo "== $family"
  tail -n 3 "runs/mini/$family/base.log" | cut -c1-200
  [ -d "runs/mini/$family/base/final" ] && $PYTHON scripts/mini_accuracy.py "runs/mini/$family/base/final" --count 1000
done
