#!/usr/bin/env bash
# Train the mini models of the families named (default: all five) side by side on one GPU: base, then Stage 1, then
# accuracy. What is unfinished after LIMIT seconds stops with a checkpoint, and another call continues it.
#   PYTHON=python3 LIMIT=560 scripts/mini_train.sh internvl3 gemma3
# Everything goes under runs/mini; runs/mini/FAMILY/{base,sft}.json hold the accuracies.
set -euo pipefail
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-3600} SEED=${SEED:-0} WORKERS=${WORKERS:-14}
families=("$@")
[ $# -gt 0 ] || families=(internvl3 gemma3 qwen2.5-vl qwen3-vl qwen3-vl-moe)
kinds="color shape at_color at_shape position exist count relation_x relation_y holds extreme_color extreme_shape"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
end=$((SECONDS + LIMIT))

draw() { # folder split count workers options...
  local out=$1 split=$2 count=$3 workers=$4
  shift 4
  [ -e "runs/mini/$out/$split/done" ] && return
  rm -rf "runs/mini/$out/$split"
  $PYTHON -m realvr world make "runs/mini/$out" --split "$split" --count "$count" --workers "$workers" "$@" >/dev/null
  touch "runs/mini/$out/$split/done"
}
jobs=()
share() { echo $(((WORKERS * $1 + 13) / 14)); }
draw world practice 16000 "$(share 6)" --format jsonl & jobs+=($!)
draw world curriculum 40000 "$(share 3)" --format jsonl --kinds $kinds & jobs+=($!)
draw world sequels 8000 "$(share 2)" --format jsonl --kinds $kinds & jobs+=($!)
draw world dialogues 5000 "$(share 1)" --format jsonl --kinds $kinds & jobs+=($!)
draw stage1 train-boxes 12000 "$(share 1)" --size 48 --withheld exclude --kinds $kinds & jobs+=($!)
draw stage1 train-plain 5000 "$(share 1)" --size 48 --withheld exclude --kinds $kinds --format jsonl & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done # one that failed stops the script
echo "pictures: $SECONDS s"

stage() { # family kind model options...
  local family=$1 kind=$2 model=$3
  shift 3
  [ -d "runs/mini/$family/$kind/final" ] && return
  timeout -s INT $((end - SECONDS > 1 ? end - SECONDS : 1)) $PYTHON -m realvr train "$kind" "configs/mini/$kind.yaml" \
    --model.path "$model" --run.out "runs/mini/$family/$kind" --run.seed "$SEED" "$@"
  [ -d "runs/mini/$family/$kind/final" ]
}
measure() { # family kind latents
  local out=runs/mini/$1/$2
  [ -e "$out.json" ] || $PYTHON scripts/mini_accuracy.py "$out/final" --latents "$3" --json "$out.json"
}
one() { # family: 16 bits and fewer steps but for the packaged one
  local out=runs/mini/$1 base=() sft=()
  [ "$1" = internvl3 ] || base=(--model.dtype bfloat16 --optim.steps "${STEPS:-3000}") sft=(--optim.steps 1000)
  mkdir -p "$out"
  [ -d "$out/new" ] || $PYTHON -m realvr new "$out/new" --family "$1" --size mini --seed "$SEED"
  stage "$1" base "$out/new" "${base[@]}" && measure "$1" base 0 &&
    stage "$1" sft "$out/base/final" "${sft[@]}" && measure "$1" sft 8
}
for family in "${families[@]}"; do
  mkdir -p "runs/mini/$family"
  one "$family" >>"runs/mini/$family/log.txt" 2>&1 &
done
wait
for family in "${families[@]}"; do
  echo "== $family"
  tail -n 1 "runs/mini/$family/base/metrics.jsonl" 2>/dev/null | cut -c1-400
  tail -n 1 "runs/mini/$family/sft/metrics.jsonl" 2>/dev/null | cut -c1-500
  grep -hE "single|second turn|benchmark" "runs/mini/$family/log.txt" || tail -n 5 "runs/mini/$family/log.txt" | cut -c1-300
done
echo "$SECONDS s"
