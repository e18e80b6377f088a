#!/bin/sh
# job.sh HOST,... HOST,... COMMAND...: NVIDIA's hosts, AMD's hosts; one JAX process on each, in this folder, started by ssh.
# ssh must log in without a password. The first host runs the coordinator, on port 7733 of the address that its name has
# there too (not 127.0.1.1), or on JAXHET_COORDINATOR_ADDRESS. JAXHET_JOB_SECRET_FILE: a file that all hosts see and only
# you can read. The exit code is 1 if a process failed.
set -eu
nvidia=$1 amd=$2
shift 2
: "${JAXHET_JOB_SECRET_FILE:?make one: (umask 077; openssl rand -hex 32 >secret), and name it here}"
quote() { printf '%s\n' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"; }
count() { echo "$1" | tr ',' '\n' | wc -l; }
command="cd $(quote "$PWD") && exec env JAXHET_AUTO=${JAXHET_AUTO:-1}"
command="$command JAXHET_COORDINATOR_ADDRESS=$(quote "${JAXHET_COORDINATOR_ADDRESS:-${nvidia%%,*}:7733}")"
command="$command JAXHET_JOB_SECRET_FILE=$(quote "$JAXHET_JOB_SECRET_FILE")"
command="$command JAXHET_NUM_PROCESSES=$(($(count "$nvidia") + $(count "$amd")))"
words=
for word in "$@"; do words="$words $(quote "$word")"; done

process=0 pids=
start() { # start ISLAND HOST,...: a terminal there (-tt), so that the command ends when its ssh does
  for host in $(echo "$2" | tr ',' ' '); do
    ssh -tt -oBatchMode=yes -oServerAliveInterval=15 -- "$host" \
      "$command JAXHET_ISLAND=$1 JAXHET_PROCESS_ID=$process$words" </dev/null &
    pids="$pids $!"
    process=$((process + 1))
  done
}
trap 'kill $pids 2>/dev/null || true' INT TERM HUP
start nvidia "$nvidia"
start amd "$amd"
code=0
for pid in $pids; do wait "$pid" || code=1; done
exit "$code"
