#!/bin/bash
# sbatch deploy/slurm/job.sh COMMAND...: a heterogeneous job of two components, an island each; a JAX process a node.
#SBATCH --job-name=jaxhet
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --partition=nvidia
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --partition=amd
#
# JAXHET_HERE: the folder deploy, on a file system that all nodes see; by default below where sbatch was called.
# JAXHET_COORDINATOR_ADDRESS: host:port of the first node of the first component; by default its name and port 7733. The
# name must be that of an address which the other nodes reach, on the node itself too (not 127.0.1.1).
set -euo pipefail
here=${JAXHET_HERE:-${SLURM_SUBMIT_DIR:-.}/deploy}
first=${SLURM_JOB_NUM_NODES_HET_GROUP_0:?"no heterogeneous job: start it by sbatch"}
second=$SLURM_JOB_NUM_NODES_HET_GROUP_1
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
export JAXHET_NUM_PROCESSES=$((first + second))
export JAXHET_COORDINATOR_ADDRESS=${JAXHET_COORDINATOR_ADDRESS:-$host:7733}
export JAXHET_JOB_SECRET_FILE=$here/.secret-$SLURM_JOB_ID
trap 'rm -f "$JAXHET_JOB_SECRET_FILE"' EXIT
(umask 077 && openssl rand -hex 32 >"$JAXHET_JOB_SECRET_FILE")

srun --het-group=0 --kill-on-bad-exit=1 --label sh "$here/process.sh" nvidia 0 "$@" &
srun --het-group=1 --kill-on-bad-exit=1 --label sh "$here/process.sh" amd "$first" "$@" &
# The other component ends by itself: its processes hear of a failure from jaxhet.
status=0
for _ in 1 2; do
  wait -n || status=$?
done
exit "$status"
