#!/usr/bin/env bash
# Muse-Glimmer-30B with a DFlash 2 drafter on one H100, H200 or B200. Not run on a GPU by us.
#
#   launch/recipes/muse-glimmer-30b.sh [more flags; the last one given wins]
set -euo pipefail
PYTHON=${PYTHON:-python3}

flags=(
    --model-path "${TARGET:-meta-models/Muse-Glimmer-30B}"
    --served-model-name muse-glimmer-30b  # a short name for clients and metrics
    --language-model-only  # DFLASH2 serves text: the vision tower is not loaded
    --speculative-algorithm DFLASH2
    --speculative-draft-model-path "${DRAFTER:-incoai/Muse-Glimmer-30B-DFlash2}"
    # Most layers see a sliding window. Triton masks trees with windows on Hopper and Blackwell alike.
    --attention-backend triton
    # Its blocks have 16 positions. A tree of 16 nodes may still be 15 deep; more nodes are for light loads.
    --speculative-num-draft-tokens 16
    --reasoning-parser muse  # thoughts go to reasoning_content, not into the answer
    --tool-call-parser muse
    --host 0.0.0.0  # reachable from outside: set --api-key, or a firewall
    --port "${PORT:-30000}"
    --enable-metrics  # /metrics, for launch/grafana
)
exec "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@"
