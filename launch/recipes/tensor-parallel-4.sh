#!/usr/bin/env bash
# Qwen3.8-27B and its drafter split over four GPUs of one machine. Not run on a GPU by us.
# All four work on the same requests: short answers, and four times the memory. For more requests than one copy
# can serve, several copies behind a router are usually better: router.sh.
#
#   launch/recipes/tensor-parallel-4.sh [more flags; the last one given wins]
set -euo pipefail
PYTHON=${PYTHON:-python3}

flags=(
    --model-path "${TARGET:-Qwen/Qwen3.8-27B}"
    --served-model-name qwen3.8-27b
    --speculative-algorithm DFLASH2
    --speculative-draft-model-path "${DRAFTER:-z-lab/Qwen3.8-27B-DFlash2}"
    # Target and drafter are split alike; the drafter's heads must divide by it, or the launch is refused.
    --tp-size 4
    --attention-backend triton  # masks trees on Hopper and Blackwell
    # A quarter of each recurrent state lies on each GPU, so there is room for more requests than on one.
    --max-running-requests 32
    --speculative-num-draft-tokens 16
    --reasoning-parser qwen3
    --tool-call-parser qwen3_coder
    --host 0.0.0.0  # reachable from outside: set --api-key, or a firewall
    --port "${PORT:-30000}"
    --enable-metrics  # rank 0 reports; rounds and tokens are counted once
)
exec "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@"
