#!/usr/bin/env bash
# Several servers, one a GPU, behind SGLang's router (also called SGLang Model Gateway): data parallelism.
# Not run on a GPU by us, and the router not by us at all: its flags are those of SGLang's documentation,
# https://docs.sglang.io/advanced_features/sgl_model_gateway.html
# The router is a package of its own: pip install sglang-router
#
#   GPUS="0 1 2 3" launch/recipes/router.sh [more flags for every server]
set -euo pipefail
PYTHON=${PYTHON:-python3}
FIRST_PORT=${FIRST_PORT:-31000}

# Whatever ends this script ends the servers, too.
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT INT TERM

urls=()
port=$FIRST_PORT
for gpu in ${GPUS:-0 1}; do
    flags=(
        --model-path "${TARGET:-Qwen/Qwen3.8-27B}"
        --served-model-name qwen3.8-27b
        --speculative-algorithm DFLASH2
        --speculative-draft-model-path "${DRAFTER:-z-lab/Qwen3.8-27B-DFlash2}"
        --attention-backend triton  # masks trees on Hopper and Blackwell
        --max-running-requests 8  # see qwen3.8-27b.sh
        --host 127.0.0.1  # only the router is to be reached from outside
        --port "$port"
        --enable-metrics
    )
    CUDA_VISIBLE_DEVICES=$gpu "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@" &
    urls+=("http://127.0.0.1:$port")
    port=$((port + 10))  # a server takes more than one port
done

router=(
    --worker-urls "${urls[@]}"
    --policy cache_aware  # to the server that has the prompt's prefix in its cache, unless it is too busy
    --worker-startup-timeout-secs 1800  # loading takes minutes
    --host 0.0.0.0
    --port "${PORT:-30000}"
    --prometheus-port 29000  # the router's own metrics; each server has its /metrics
)
"$PYTHON" -m sglang_router.launch_router "${router[@]}"
