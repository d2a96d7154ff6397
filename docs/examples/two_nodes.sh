#!/bin/bash
# On each of two machines: two_nodes.sh NODE_RANK FIRST_MACHINE. Goes on from the last checkpoint if there is one.
set -euo pipefail
RESUME=
if [ -e runs/qwen3_8b/grail/checkpoints/last.ckpt ]; then RESUME=--ckpt_path=last; fi
torchrun --nnodes=2 --node-rank="$1" --nproc-per-node=8 --master-addr="$2" --master-port=29500 -m grail_lightning fit \
    --config configs/published/qwen3_8b.yaml --config configs/published/grail.yaml \
    --config configs/clusters/nodes.yaml $RESUME
