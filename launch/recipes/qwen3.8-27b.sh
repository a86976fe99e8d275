#!/usr/bin/env bash
# Qwen3.8-27B with its DFlash 2 drafter on one H100, H200 or B200. Not run on a GPU by us.
#
#   launch/recipes/qwen3.8-27b.sh [more flags; the last one given wins]
set -euo pipefail
PYTHON=${PYTHON:-python3}

flags=(
    --model-path "${TARGET:-Qwen/Qwen3.8-27B}"
    --served-model-name qwen3.8-27b  # a short name for clients and metrics
    --speculative-algorithm DFLASH2
    --speculative-draft-model-path "${DRAFTER:-z-lab/Qwen3.8-27B-DFlash2}"
    # Masks trees on all three GPUs. On an H100 or H200 fa3 may be faster: try --attention-backend fa3.
    # On a B200 SGLang's own choice may be trtllm_mha, which cannot mask a tree and is refused.
    --attention-backend triton
    # This target has recurrent layers. Each running request reserves one recurrent state for each node that
    # is verified, so memory grows with requests x nodes: bound both. 8 x 16 is meant for 141 GB (H200) and
    # more; begin an H100 with 80 GB at --max-running-requests 2 --speculative-num-draft-tokens 8.
    --max-running-requests 8
    --speculative-num-draft-tokens 16
    --reasoning-parser qwen3  # thoughts go to reasoning_content, not into the answer
    --tool-call-parser qwen3_coder
    --host 0.0.0.0  # reachable from outside: set --api-key, or a firewall
    --port "${PORT:-30000}"
    --enable-metrics  # /metrics, for launch/grafana
)
exec "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@"
