#!/bin/sh
# Claude Code on a task in this folder: where it calls is all that changes. Every turn of it becomes a step.
#
#   headrace serve --vllm-addresses http://127.0.0.1:8001    # a vLLM that can do the task; see docs/gateway.md
#   sh examples/gateway_claude_code.sh [http://127.0.0.1:8100]
set -eu
base=${1:-http://127.0.0.1:8100}/my-run-$(date +%s)-$$/question-7 # every run is a trajectory of its own
curl -fsS -X POST "$base/register_trajectory" > /dev/null

export ANTHROPIC_BASE_URL="$base" ANTHROPIC_API_KEY=not-needed CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p "Replace one by two in a.txt." --allowedTools Read,Edit,Bash

reward=$(grep -c '^two$' a.txt || true)
curl -fsS -X POST "$base/complete_trajectory" --json "{\"reward\": $reward}"
