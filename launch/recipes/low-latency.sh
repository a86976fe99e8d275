#!/usr/bin/env bash
# Profile: few users, each answer as fast as it can be. Not run on a GPU by us.
# While a pass is bound by reading the weights, further nodes cost little: verify many, admit few requests.
#
#   TARGET=... DRAFTER=... launch/recipes/low-latency.sh [more flags; the last one given wins]
set -euo pipefail
PYTHON=${PYTHON:-python3}

flags=(
    --model-path "${TARGET:-Qwen/Qwen3.8-27B}"
    --speculative-algorithm DFLASH2
    --speculative-draft-model-path "${DRAFTER:-z-lab/Qwen3.8-27B-DFlash2}"
    --attention-backend triton  # masks trees on Hopper and Blackwell
    # Twice the default. Watch "Tokens gained per verified node" in launch/grafana: where doubling the nodes
    # hardly lengthens what is accepted, go back.
    --speculative-num-draft-tokens 32
    --speculative-eagle-topk 8  # children of a node; the default, and rarely the limit
    --max-running-requests 4  # the fifth waits: better than slowing down the four
    --schedule-policy fcfs  # first come, first served: no request is overtaken
    --chunked-prefill-size 2048  # a long prompt holds up running answers for a short time only
    --stream-interval 1  # send tokens as they come; a round already brings several at once
    --host 0.0.0.0  # reachable from outside: set --api-key, or a firewall
    --port "${PORT:-30000}"
    --enable-metrics
)
exec "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@"
