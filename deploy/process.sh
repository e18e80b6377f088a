#!/bin/sh
# process.sh ISLAND FIRST COMMAND...: runs COMMAND as a process of the job. Its number is FIRST plus its index among
# the processes that one launcher numbers from 0: Slurm's step, Open MPI's or MPICH's ranks, a Kubernetes Job's
# or Volcano task's pods. The other variables (JAXHET_COORDINATOR_ADDRESS, JAXHET_NUM_PROCESSES, JAXHET_JOB_SECRET_FILE)
# are those of the whole job.
set -eu
island=$1 first=$2
shift 2
index=${JOB_COMPLETION_INDEX:-${VC_TASK_INDEX:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-}}}}}
if [ -z "$index" ]; then
  echo "process.sh: no JOB_COMPLETION_INDEX, VC_TASK_INDEX, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID:" \
    "start it by Slurm, MPI or Kubernetes" >&2
  exit 2
fi
export JAXHET_ISLAND="$island" JAXHET_PROCESS_ID=$((first + index)) JAXHET_AUTO="${JAXHET_AUTO:-1}"
exec "$@"
