#!/bin/sh
# An agent is whatever can send HTTP. Its uid is its own; the prompt's is that of the question it tries.
#
# headrace serve --engine tiny                      # in another terminal; for vLLM see docs/gateway.md
# sh examples/gateway_curl.sh [http://127.0.0.1:8100]
set -eu
base=${1:-http://127.0.0.1:8100}/my-run-$(date +%s)-$$/question-7 # every run is a trajectory of its own
json='content-type: application/json'

post() { curl --silent --show-error --fail-with-body --noproxy '*' -X POST "$base/v1/$1" -H "$json" -d "$2"; echo; }

post register_trajectory '{"metadata": {"secret": "7"}}'
post chat/completions '{"messages": [{"role": "user", "content": "Guess."}], "max_tokens": 8}'
post responses '{"input": "Guess.", "max_output_tokens": 8}'
post messages '{"messages": [{"role": "user", "content": "Guess."}], "max_tokens": 8}'
post complete_trajectory '{"reward": 0.5}'
