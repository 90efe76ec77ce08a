#!/bin/bash
# Equal workers under Open MPI's mpirun, averaged by all-reduce (over gRPC: mpirun only starts them). Arguments go to every task:
#   HOSTS=host0:2,host1:2 configs/launchers/openmpi.sh cifar10 --synthetic --max-steps 1000 --threads 8
# HOSTS tells how many tasks each host gets. With PS=1 the first task is a parameter server, in mode ${MODE:-ps-sync}.
set -euo pipefail

# An address per rank; tasks are ranks in order, parameter servers first.
hosts=${HOSTS:-localhost:2} port=${PORT:-22220} ps=() workers=()
for entry in ${hosts//,/ }; do
  for ((i = 0; i < ${entry##*:}; i++)); do
    address=${entry%:*}:$port
    if ((${#ps[@]} < ${PS:-0})); then ps+=("$address"); else workers+=("$address"); fi
    port=$((port + 1))
  done
done
list() { local IFS=,; echo "$*"; }
mode=collective
((${#ps[@]} == 0)) || mode=${MODE:-ps-sync}

# A secret of this run. Beyond loopback there must be one.
export TFTRAIN_TOKEN=${TFTRAIN_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# By itself mpirun binds every task to a core or a socket, and kills a second after its SIGTERM, too soon to save. With GRACE it
# waits that many seconds, asks the tasks to save, and kills after as many again: when it is told to end, and when a task failed.
exec mpirun --host "$hosts" --map-by slot --bind-to none --mca odls_base_sigkill_timeout "${GRACE:-10}" -x TFTRAIN_TOKEN \
  "${TFTRAIN:-tftrain}" "$@" --ps-hosts "$(list "${ps[@]}")" --worker-hosts "$(list "${workers[@]}")" \
  --train-dir "${TRAIN_DIR:-runs/openmpi}" --set "cluster.mode=$mode" --resume
