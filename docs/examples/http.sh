#!/usr/bin/env bash
# Ask a server with curl: is it up, what is it, OpenAI's chat, a stream, SGLang's own /generate, metrics.
#
#   docs/examples/http.sh --base-url http://127.0.0.1:30000
set -euo pipefail

base_url=http://127.0.0.1:30000
if [ "${1:-}" = --base-url ]; then base_url=$2; fi

ask() {  # METHOD PATH [JSON]: print the answer, fail on an HTTP error
    echo "--- $1 $2" >&2
    curl --fail-with-body --silent --show-error --no-buffer --max-time 120 --request "$1" \
        --header 'Content-Type: application/json' ${3:+--data "$3"} "$base_url$2"
    echo
}

# Ready? Answers after a second or so, as a token is generated for it.
ask GET /health

# The model's name, and what DFLASH2's settings were resolved to ("dflash2" in the state of the scheduler).
ask GET /v1/models
ask GET /server_info

# OpenAI's interface. The name of the model is not checked.
ask POST /v1/chat/completions '{
    "model": "default",
    "messages": [{"role": "user", "content": "why is the sea salty?"}],
    "temperature": 0, "max_tokens": 32
}'

# The same as a stream of server-sent events: "data: {...}" lines, the last one "data: [DONE]".
ask POST /v1/chat/completions '{
    "model": "default", "stream": true,
    "messages": [{"role": "user", "content": "why is the sea salty?"}],
    "temperature": 0, "max_tokens": 16
}'

# SGLang's own interface, here with a regular expression. In "meta_info", spec_verify_ct counts the verify
# passes of this request, and spec_accept_length is what each of them gained.
ask POST /generate '{
    "text": "a date, day and month: ",
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "regex": "[0-3][0-9]/[01][0-9]"}
}'
ask POST /generate '{
    "text": "one, two, three,",
    "sampling_params": {"temperature": 0, "max_new_tokens": 32}
}'

# Only with --enable-metrics; ours begin with sglang:dflash2_.
curl --fail --silent "$base_url/metrics" | grep '^sglang:dflash2_' ||
    echo "(no metrics: launch with --enable-metrics)"
