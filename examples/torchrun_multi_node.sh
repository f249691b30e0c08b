#!/usr/bin/env bash
# Fine-tune over several machines. Run it on every one of them, with the same values but for NODE:
#
#   NODES=2 NODE=0 HEAD=first-host MODEL=my-llama DATA=texts/ RUN=shared/my-run ./torchrun_multi_node.sh --gpu 70GiB
#   NODES=2 NODE=1 HEAD=first-host MODEL=my-llama DATA=texts/ RUN=shared/my-run ./torchrun_multi_node.sh --gpu 70GiB
#
# MODEL and DATA hold the same files on every machine; RUN is on a file system that all of them see.
set -euo pipefail
: "${NODES:?the number of machines}" "${NODE:?the number of this one, from 0}" "${HEAD:?the host name of machine 0}"
: "${MODEL:?a folder of a Transformers model}" "${DATA:?a text file, a .jsonl file, or a folder}" "${RUN:?a new folder}"

# torchrun passes Ctrl-C and SIGTERM on, and kills its workers so many seconds later: time for a step and a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

exec torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" \
    -m overspill train --model "$MODEL" --data "$DATA" --run-folder "$RUN" "$@"
