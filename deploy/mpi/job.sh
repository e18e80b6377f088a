#!/bin/sh
# job.sh HOST,... HOST,... COMMAND...: NVIDIA's hosts, AMD's hosts; one JAX process on each, started by Open MPI.
# The first host runs the coordinator, on port 7733 of the address that its name has there too (not 127.0.1.1), or on
# JAXHET_COORDINATOR_ADDRESS. JAXHET_JOB_SECRET_FILE: a file that all hosts see and only you can read.
set -eu
nvidia=$1 amd=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
count() { echo "$1" | tr ',' '\n' | wc -l; }
: "${JAXHET_JOB_SECRET_FILE:?make one: (umask 077; openssl rand -hex 32 >secret), and name it here}"
export JAXHET_JOB_SECRET_FILE
export JAXHET_COORDINATOR_ADDRESS="${JAXHET_COORDINATOR_ADDRESS:-${nvidia%%,*}:7733}"
n=$(count "$nvidia") m=$(count "$amd")
export JAXHET_NUM_PROCESSES=$((n + m))
# Ranks count through both contexts: each has 0 as the first.
exec mpirun \
  -x JAXHET_COORDINATOR_ADDRESS -x JAXHET_NUM_PROCESSES -x JAXHET_JOB_SECRET_FILE \
  -np "$n" --host "$nvidia" sh "$here/process.sh" nvidia 0 "$@" : \
  -x JAXHET_COORDINATOR_ADDRESS -x JAXHET_NUM_PROCESSES -x JAXHET_JOB_SECRET_FILE \
  -np "$m" --host "$amd" sh "$here/process.sh" amd 0 "$@"
