#!/usr/bin/env bash
# Profile: many users, most tokens a second in all. Not run on a GPU by us.
# A busy GPU is bound by arithmetic, and each further node costs what a further request would: verify narrow
# trees. Beyond some load plain decoding wins (on a CPU: docs/benchmarks.md), so compare before you choose.
#
#   TARGET=... DRAFTER=... launch/recipes/high-throughput.sh [more flags; the last one given wins]
set -euo pipefail
PYTHON=${PYTHON:-python3}

flags=(
    --model-path "${TARGET:-Qwen/Qwen3.8-27B}"
    --speculative-algorithm DFLASH2
    --speculative-draft-model-path "${DRAFTER:-z-lab/Qwen3.8-27B-DFlash2}"
    --attention-backend triton  # masks trees on Hopper and Blackwell
    --speculative-num-draft-tokens 8  # the likeliest paths only
    # The recurrent layers of this target bound requests x nodes, see qwen3.8-27b.sh. A target without any can
    # take 96 and more; 48 is the default.
    --max-running-requests 32
    --schedule-policy lpm  # requests that share a prefix with the cache come first
    --chunked-prefill-size 8192  # large chunks keep the GPU busy
    --mem-fraction-static 0.85  # KV cache as large as fits; lower it on "out of memory"
    --stream-interval 4  # fewer, larger messages: less work for the host
    --host 0.0.0.0  # reachable from outside: set --api-key, or a firewall
    --port "${PORT:-30000}"
    --enable-metrics
)
exec "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@"
