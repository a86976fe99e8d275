#!/usr/bin/env bash
# A machine without a GPU: serve the demo pair, SmolLM2-135M-Instruct and the drafter in this package.
# The first run downloads the target (93 MB). `dflash2-sglang demo` compares it with plain decoding instead.
#
#   launch/recipes/cpu-demo.sh [more flags of sglang.launch_server]
set -euo pipefail
PYTHON=${PYTHON:-python3}

TARGET=$("$PYTHON" -c 'from dflash2_sglang.cli.demo_model import ensure_demo_model as f; print(f())')
DRAFTER=$("$PYTHON" -c 'from dflash2_sglang.cli.demo_model import demo_drafter as f; print(f())')

# Device, bfloat16, attention backend, KV size and idle sleep are set by the CPU platform and logged.
flags=(
    --model-path "$TARGET"
    --served-model-name smollm2-135m  # or clients would have to name the folder
    --speculative-algorithm DFLASH2
    --speculative-draft-model-path "$DRAFTER"
    --host 127.0.0.1  # reachable from this machine only
    --port "${PORT:-30000}"
    --enable-metrics  # /metrics, for launch/grafana
)
exec "$PYTHON" -m sglang.launch_server "${flags[@]}" "$@"
