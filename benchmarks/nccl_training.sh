#!/usr/bin/env bash
# Four GPUs: the same small run on several layouts, each compared with the one before; resuming on another layout;
# torchrun; and a killed rank.   benchmarks/nccl_training.sh OUT_FOLDER 2>&1 | tee benchmarks/results/nccl_training.log
set -u
out=$1
go() {
  echo "=== $*"
  timeout -k 3 60 python3 -m penteract train --output.folder="$out" "$@" >"$out.log" 2>&1
  echo "rc $?"
  grep "^loss\|^largest\|error\|run_dir" "$out.log" | tail -2
}
short="--steps 12 --training.sample_tokens=20"
go $short
go $short --parallel.tp=2 --parallel.pp=2 --compare latest
go $short --parallel.pp=4 --parallel.schedule zb_h1 --compare latest
go $short --parallel.pp=2 --parallel.vpp=2 --parallel.schedule interleaved --parallel.tp=2 --compare latest
go $short --parallel.dp=2 --parallel.cp=2 --parallel.cp_method=ring --compare latest --memory.bucket_bytes=65536
go $short --preset tiny-moe
go $short --preset tiny-moe --parallel.ep=4 --compare latest --json
go --steps 16 --resume latest --parallel.ep=2 --parallel.dp=2 --parallel.tp=2
echo "=== torchrun"
timeout -k 3 60 python3 -m torch.distributed.run --standalone --nproc-per-node 4 -m penteract train --steps 4 \
  --training.sample_tokens=0 --output.folder="$out" --parallel.tp=4 --json 2>/dev/null | tail -1
echo "=== a rank is killed"
(timeout -k 3 60 python3 -m penteract train --steps 100000 --parallel.dp=4 --output.folder="$out" >"$out.log" 2>&1
 echo "rc $?"; tail -1 "$out.log") &
sleep 16
kill -9 "$(pgrep -nf 'engine.runtime.worke[r]')"
begun=$(date +%s)
wait
echo "all ranks gone after $(($(date +%s) - begun)) s"
