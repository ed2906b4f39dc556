#!/usr/bin/env bash
# Submit a replay to a Ray cluster, follow what it prints, and exit with 0 if its exit code is 0, else with 1.
#     deploy/ray-job.sh http://HEAD:8265 --processes 8 --backend fsdp2 --tp 2 --log-folder /shared/logs
# Its nodes need micro-replay and ray[default] installed; paths are those of the nodes. Where the cluster wants a token:
#     export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...
set -euo pipefail
if [[ $# -eq 0 || $1 != http* ]]; then
    echo "deploy/ray-job.sh: the first argument is ${1:-missing}; it has to be the address of Ray's dashboard." \
        "Try: deploy/ray-job.sh http://HEAD:8265 --processes 8 --backend fsdp2" >&2
    exit 2
fi
dashboard=$1
shift
exec ray job submit --address "$dashboard" -- replay "$@" --launcher ray --address auto
