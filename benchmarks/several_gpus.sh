#!/usr/bin/env bash
# What needs several GPUs, one stage a call; each ends by itself within ten minutes and prints as it goes.
#
#   bash benchmarks/several_gpus.sh drills INPUTS OUT       deaths and hangs under NCCL, refusals, the README's commands
#   bash benchmarks/several_gpus.sh attention INPUTS OUT    ring attention, and tensor parallelism at 8k tokens
#   bash benchmarks/several_gpus.sh two INPUTS OUT          the configurations of two GPUs
#   bash benchmarks/several_gpus.sh four INPUTS OUT         the configurations of four GPUs
set -uo pipefail
cd "$(dirname "$0")/.."
stage=$1 inputs=$2 out=$3
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

step() { # step SECONDS COMMAND...: its last lines, its exit code and how long it took
    local limit=$1 began=$SECONDS code
    shift
    echo "\$ $*"
    timeout -k 15 "$limit" "$@" >"$out/step.log" 2>&1
    code=$?
    cat "$out/step.log" >>"$out/$stage.log"
    tail -n "${LINES_SHOWN:-14}" "$out/step.log" | cut -c1-400
    echo "exit code $code after $((SECONDS - began)) s"
}

configurations() { # configurations SECONDS NUM_GPUS ARGUMENTS...
    local seconds=$1 num_gpus=$2
    shift 2
    LINES_SHOWN=40 step "$((seconds + 30))" python3 benchmarks/configurations.py --num-gpus "$num_gpus" \
        --model llama-3.1-8b --warmup 2 --limit 75 --total "$seconds" --out "/tmp/$stage-$num_gpus" "$@"
}

case $stage in
drills)
    step 90 deepspeed --num_gpus=2 replay --shuffle-inputs --max-inputs 10
    step 90 torchrun replay --backend fsdp2 --tp 2
    step 90 deepspeed --num_gpus=2 replay --tp 2 --zero-stage 1 --max-inputs 5
    step 60 replay --backend fsdp2 --ring 2 --max-inputs 5
    step 60 torchrun --nproc-per-node 3 replay --backend fsdp2
    step 60 replay --backend fsdp2 --tp 2 --ring 2
    for tokens in 2048 400000 2049; do # the second is more than a GPU holds; the third has to be right after it
        step 30 python3 benchmarks/long_input.py /tmp/too-long --tokens "$tokens" --count 1
    done
    step 90 replay --inputs /tmp/too-long --model llama-3.1-8b --warmup 0
    LINES_SHOWN=40 step 240 python3 -m pytest -q -p no:cacheprovider tests/test_deaths_and_hangs.py \
        -k "killed or raised or out_of_memory or blocked or extra or uneven"
    ;;
attention)
    LINES_SHOWN=20 step 150 torchrun --nproc-per-node 2 benchmarks/ring_attention.py --tokens 32768
    step 30 python3 benchmarks/long_input.py /tmp/long --tokens 8192 --count 8
    configurations 240 2 --inputs /tmp/long --only '(one GPU|tp 2|ring 2)$'
    ;;
two) configurations 540 2 --inputs "$inputs" --max-inputs 10 ;;
four) configurations 400 4 --inputs "$inputs" --max-inputs 10 --only '^(?!.*sdpa)' ;;
*)
    echo "there is no stage $stage; allowed are drills, attention, two, four" >&2
    exit 2
    ;;
esac
