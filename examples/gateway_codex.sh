#!/bin/sh
# Codex on a task in this folder: a provider with our address, and no tools but functions. Every turn becomes a step.
#
#   headrace serve --vllm-addresses http://127.0.0.1:8001    # a vLLM that can do the task; see docs/gateway.md
#   sh examples/gateway_codex.sh [http://127.0.0.1:8100]
set -eu
base=${1:-http://127.0.0.1:8100}/my-run-$(date +%s)-$$/question-7 # every run is a trajectory of its own
curl -fsS -X POST "$base/register_trajectory" > /dev/null

set -- -c model_provider=headrace -c model=any -c web_search=disabled
set -- "$@" -c "model_providers.headrace={name='headrace', base_url='$base/v1', wire_api='responses'}"
codex exec "$@" --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "Write two into a.txt."

reward=$(grep -c '^two$' a.txt || true)
curl -fsS -X POST "$base/complete_trajectory" --json "{\"reward\": $reward}"
