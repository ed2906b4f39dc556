#!/usr/bin/env bash
# What needs several GPUs, one stage a call; each ends by itself within ten minutes and prints as it goes.
#
#   bash benchmarks/several_gpus.sh drills INPUTS OUT       the README's commands, refusals, a CUDA out of memory
#   bash benchmarks/several_gpus.sh deaths INPUTS OUT       deaths and hangs under NCCL
#   bash benchmarks/several_gpus.sh attention INPUTS OUT    ring attention beside one GPU and beside bare calls
#   bash benchmarks/several_gpus.sh long INPUTS OUT         tensor parallelism and ring at 8k tokens
#   bash benchmarks/several_gpus.sh two INPUTS OUT          the configurations of two GPUs; `compiled`: the same, compiled
#   bash benchmarks/several_gpus.sh four INPUTS OUT         the configurations of four GPUs
#   bash benchmarks/several_gpus.sh learning INPUTS OUT     doctor, diagnose and the suite on all GPUs there are
#   bash benchmarks/several_gpus.sh parity INPUTS OUT       parity's full matrix, as much of it as TOTAL allows
#   bash benchmarks/several_gpus.sh tests INPUTS OUT        pytest -m gpu and -m multi_gpu, side by side
#
# MODEL is a preset, folder or config.json (llama-3.1-8b); TOTAL the seconds that `two` and `compiled` may take (540);
# ONLY a regular expression for the names of the rows of `two`; CASES a pytest expression for those of `deaths`; LAYERS
# how many of the model's layers learn (20) or are compared (2), AT_ONCE with how many processes on each GPU (5); CONTINUE
# the folder of a parity run to go on with.
set -uo pipefail
cd "$(dirname "$0")/.."
stage=$1 inputs=$2 out=$3
model=${MODEL:-llama-3.1-8b}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

step() { # step SECONDS COMMAND...: its last lines, its exit code and how long it took
    local limit=$1 began=$SECONDS code log
    shift
    log=$(mktemp)
    timeout -k 15 "$limit" "$@" >"$log" 2>&1
    code=$?
    {
        echo "\$ $*"
        cat "$log"
    } >>"$out/$stage.log"
    echo "\$ $*"
    tail -n "${LINES_SHOWN:-14}" "$log" | cut -c1-400
    echo "exit code $code after $((SECONDS - began)) s"
}

configurations() { # configurations SECONDS NUM_GPUS ARGUMENTS...
    local seconds=$1 num_gpus=$2
    shift 2
    LINES_SHOWN=50 step "$((seconds + 30))" python3 benchmarks/configurations.py --num-gpus "$num_gpus" \
        --model "$model" --warmup 2 --limit 150 --total "$seconds" --out "/tmp/$stage-$num_gpus" "$@"
}

case $stage in
drills)
    step 90 deepspeed --num_gpus=2 replay --shuffle-inputs --max-inputs 10
    step 90 torchrun replay --backend fsdp2 --tp 2
    step 90 deepspeed --num_gpus=2 replay --tp 2 --zero-stage 1 --max-inputs 5
    step 60 replay --backend fsdp2 --ring 2 --max-inputs 5
    step 60 deepspeed --num_gpus=2 replay --ring 2 --max-inputs 5
    step 60 torchrun --nproc-per-node 3 replay --backend fsdp2
    step 60 replay --backend fsdp2 --tp 2 --ring 2
    for tokens in 2048 "${TOO_MANY:-400000}" 2049; do # the second is more than a GPU holds; the third has to be right after it
        step 30 python3 benchmarks/long_input.py /tmp/too-long --tokens "$tokens" --count 1
    done
    step 90 replay --inputs /tmp/too-long --model "$model" --warmup 0
    ;;
deaths)
    LINES_SHOWN=400 step 240 python3 -m pytest -sv -o addopts= -p no:cacheprovider --tb=short \
        tests/replay/test_deaths_and_hangs.py -k "${CASES:-test}" | grep -oE "^FAILED.*|(torchrun|deepspeed), [^:]*: ended.*|^=.*(passed|failed).*|^exit code.*"
    ;;
attention)
    nvidia-smi topo -m | head -4
    LINES_SHOWN=30 step 150 torchrun --nproc-per-node 2 benchmarks/ring_attention.py --tokens "${TOKENS:-32768}"
    ;;
long)
    step 30 python3 benchmarks/long_input.py /tmp/long --tokens 8192 --count 8
    configurations 240 2 --inputs /tmp/long --only '(one GPU|tp 2|ring 2)$'
    ;;
two) configurations "${TOTAL:-540}" 2 --inputs "$inputs" --max-inputs 10 --only "${ONLY:-^(?!.*compiled)}" ;;
compiled) configurations "${TOTAL:-540}" 2 --inputs "$inputs" --max-inputs 10 --only '^(?!.*sdpa).*compiled' ;;
four) configurations 400 4 --inputs "$inputs" --max-inputs 10 --only '^(?!.*sdpa)' ;;
learning)
    LINES_SHOWN=60 step 90 replay doctor
    LINES_SHOWN=30 step 150 replay diagnose --backend fsdp2 --inputs "$inputs" --model "$model" --num-layers 4
    LINES_SHOWN=60 step 320 replay suite --dataset "$inputs" --model "$model" --num-layers "${LAYERS:-20}" --learning-rate 1e-5 \
        --log-folder "$out"
    ;;
parity)
    total=${TOTAL:-500}
    work=(--matrix full --inputs "$inputs" --model "$model" --num-layers "${LAYERS:-2}" --max-inputs 4 --log-folder "$out")
    [ -z "${CONTINUE:-}" ] || work=(--continue "$CONTINUE")
    LINES_SHOWN=${LINES_SHOWN:-150} step "$((total + 60))" replay parity "${work[@]}" --time-limit "$total" --cell-timeout 150 \
        --at-once "${AT_ONCE:-5}"
    ;;
tests)
    for marker in gpu multi_gpu; do
        LINES_SHOWN=40 step "${TOTAL:-400}" python3 -m pytest -v -o addopts= -p no:cacheprovider --tb=short --durations=0 \
            -m "$marker" &
    done
    wait
    ;;
*)
    echo "there is no stage $stage; allowed are drills, deaths, attention, long, two, compiled, four, learning, parity, tests" >&2
    exit 2
    ;;
esac
