#!/usr/bin/env bash
# Go on training a mini base on fresh scenes with a new schedule: START (a model), OUT, STEPS, LIMIT in seconds.
set -euo pipefail
PYTHON=${PYTHON:-python3} STEPS=${STEPS:-2000} LIMIT=${LIMIT:-540} SEED=${SEED:-1} LR=${LR:-5e-4}
kinds="color shape at_color at_shape position exist count relation_x relation_y holds extreme_color extreme_shape"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
for part in "curriculum 60000" "dialogues 5000" "sequels 8000"; do
  read -r split count <<<"$part"
  [ -d "runs/mini/world/$split" ] || $PYTHON -m realvr world make runs/mini/world --split "$split" --count "$count" \
    --kinds $kinds --seed "$SEED" --format jsonl --workers 6 &
done
wait
timeout -s INT "$LIMIT" $PYTHON -m realvr train base configs/mini/base.yaml --model.path "$START" --run.out "$OUT_RUN" \
  --run.seed "$SEED" --optim.steps "$STEPS" --optim.lr "$LR" --optim.warmup 60 --caption_ratio 0.1 || true
