#!/bin/bash
# A build on Slurm: one Ray node on each machine of the allocation, the driver on the first.
#
#     sbatch cluster/slurm.sh --model Qwen/Qwen3-8B --dataset prompts.jsonl --layers eagle3 --out /shared/x
#
# Lines to change are marked CHANGE. Slurm's SIGTERM before the time limit stops the build cleanly; submitting it again
# resumes it, and so does --requeue after a pre-emption.
#SBATCH --job-name=hsray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
#SBATCH --time=24:00:00
# CHANGE the numbers above, and perhaps add --partition and --account

set -euo pipefail

# CHANGE: a checkout on a filesystem that every node sees, in which `make` has installed .venv
cd "${HSRAY_HOME:-$SLURM_SUBMIT_DIR}"
export PATH="$PWD/.venv/bin:$PATH"

# Other users of the cluster must not be able to run code in this one.
umask 077
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token"
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
    python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH"
fi

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head_node" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_ADDRESS="$head_ip:$port"

# A folder of its own for each job: two jobs on one node do not find each other's Ray.
temp_dir="/tmp/hsray-$SLURM_JOB_ID"
start=(ray start --block --disable-usage-stats --num-cpus="$SLURM_CPUS_PER_TASK")

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head_node" \
    "${start[@]}" --head --node-ip-address="$head_ip" --port="$port" --temp-dir="$temp_dir" &
sleep 20
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head_node" \
        "${start[@]}" --address="$RAY_ADDRESS" &
fi

# The build counts the GPUs that are there when it starts.
python - "$SLURM_JOB_NUM_NODES" <<'END'
import sys
import time

import ray

ray.init(log_to_driver=False)
ends = time.monotonic() + 300
while len([node for node in ray.nodes() if node["Alive"]]) < int(sys.argv[1]):
    if time.monotonic() > ends:
        sys.exit(f"of {sys.argv[1]} nodes only {len(ray.nodes())} joined within 300 s; see /tmp/hsray-* there")
    time.sleep(2)
END

python pipelines/build.py "$@" &
build=$!
trap 'kill -TERM "$build"' TERM
status=0
wait "$build" || status=$?
if kill -0 "$build" 2> /dev/null; then # the trap ended that wait
    status=0
    wait "$build" || status=$?
fi
exit "$status"
