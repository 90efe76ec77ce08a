#!/usr/bin/env bash
# Runs configs/launchers/: Slurm with two nodes on loopback, mpirun with two hosts, the containers of the Kubernetes manifests.
#   .ci/launchers.sh TFTRAIN PYTHON-WITH-YAML
# Needs root, and Debian's packages, which it installs where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
tftrain=$(realpath "$1") python=$2 files=$PWD/configs/launchers

if [ "$(id -u)" != 0 ]; then
  echo "SKIPPED: the launchers need root for Slurm's daemons and private mounts; nothing of configs/launchers was run"
  exit 0
fi
# Debian has munged and the daemons where only root looks.
export PATH=$PATH:/usr/sbin:/sbin
if ! type sbatch slurmctld slurmd munged mpirun unshare ip > /dev/null 2>&1; then
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    slurm-wlm munge openmpi-bin util-linux iproute2; } > /tmp/launchers-apt.log 2>&1; then
    tail -n 5 /tmp/launchers-apt.log
    echo "SKIPPED: apt-get cannot install slurm-wlm, munge and openmpi-bin; nothing of configs/launchers was run"
    exit 0
  fi
fi

work=$(mktemp -d)
finish() {
  local code=$?
  if ((code != 0)); then tail -n 30 "$work"/*.log "$work"/*.out 2> /dev/null || true; fi
  # First the jobs, which would outlive their nodes' daemons; then the latest daemon first.
  if [ -e "$work/cluster-is-up" ]; then
    scancel --user root || true
    for _ in $(seq 100); do [ -n "$(squeue --noheader)" ] || break; sleep 0.1; done
  fi
  for pid in $(jobs -p | tac); do kill "$pid" 2> /dev/null || true; done
  wait
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT

say() { echo "-- $* ($SECONDS s)"; }
fail() { echo "FAILED: $*"; exit 1; }
# Waits for a command to succeed, 20 s at most.
until_ok() {
  for _ in $(seq 200); do if "$@" > /dev/null 2>&1; then return; fi; sleep 0.1; done
  fail "still not: $*"
}
# The expected exit code, then a command.
expect() {
  local want=$1 got=0
  shift
  "$@" > "$work/command.out" 2>&1 || got=$?
  [ "$got" = "$want" ] || fail "exit code $got instead of $want: $*"
}
# A run has fitted y = 5x + 8 and ended at this step.
fitted() {
  "$python" - "$1/metrics.jsonl" "$2" << 'PY'
import json, sys
last = [line for line in map(json.loads, open(sys.argv[1])) if line["kind"] == "step"][-1]
values = dict(last["variables"])
assert last["step"] == int(sys.argv[2]) - 1, last
assert abs(values["weight"] - 5) < 0.05 and abs(values["bias"] - 8) < 0.05, last
print(f"{sys.argv[1]}: step {last['step']}, weight {values['weight']:.3f}, bias {values['bias']:.3f}")
PY
}
saved_step() { sed -n 's/^model_checkpoint_path: "model.ckpt-\([0-9]*\).*/\1/p' "$1/checkpoint" || true; }
logged() { grep -q '"step":1000,' "$1/metrics.jsonl"; }

export TFTRAIN=$tftrain
endless=(line-fit --max-steps 1000000000 --log-every 500)
cd "$work"

say "Slurm: a controller and two nodes"
# Nodes are named by addresses of loopback, so each has a host of its own; every job may share them with others.
host=$(hostname)
mkdir state
cat > slurm.conf << CONF
ClusterName=gate
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmdSpoolDir=$work/spool-%n
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
NodeName=127.0.0.[1-2] NodeHostname=$host NodeAddr=127.0.0.[1-2] Port=[17001-17002] CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
export SLURM_CONF=$work/slurm.conf
head -c 1024 /dev/urandom > munge.key
chmod 400 munge.key
daemon() { "$@" > "$1.out" 2>&1 & }
daemon munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" --seed-file="$work/munge.seed" \
  --pid-file="$work/munge.pid" --log-file="$work/munge.log"
until_ok munge --socket "$work/munge.socket" --no-input
daemon slurmctld -D -i
for node in 127.0.0.1 127.0.0.2; do mkdir "spool-$node"; daemon slurmd -D -N "$node"; done
up() { [ "$(sinfo --noheader --Node --states=idle | wc -l)" = 2 ]; }
until_ok up
touch cluster-is-up
# A job in this train directory; its number.
submit() { TRAIN_DIR=$1 sbatch --parsable --nodes 2 --ntasks-per-node 2 "${@:2}"; }
# `sbatch --wait` looks ever more seldom.
job_is_over() { ! scontrol show job "$1" | grep -qE "JobState=(PENDING|RUNNING|COMPLETING)"; }
job_ends() {
  until_ok job_is_over "$2"
  scontrol show job "$2" | grep -q "ExitCode=$1:0" || { cat "tftrain-$2.log"; fail "job $2 did not end with $1"; }
}

say "Slurm: two jobs at once on 2 nodes x 2 tasks, then parameter servers"
a=$(submit a "$files/slurm.sbatch" line-fit --max-steps 5000)
b=$(submit b "$files/slurm.sbatch" line-fit --max-steps 5000)
job_ends 0 "$a"
job_ends 0 "$b"
fitted a 5000
fitted b 5000
job_ends 0 "$(PS=1 submit c "$files/slurm-ps.sbatch" line-fit)"
fitted c 1000

say "Slurm: a job that diverges ends with 6; one told to end or cancelled saves, and goes on from there"
job_ends 6 "$(submit d "$files/slurm.sbatch" line-fit --learning-rate 1e30)"
job=$(submit e "$files/slurm.sbatch" "${endless[@]}")
until_ok logged e
scancel --signal=TERM "$job"
job_ends 143 "$job"
step=$(saved_step e)
job=$(submit e "$files/slurm.sbatch" line-fit --max-steps $((step + 500)))
job_ends 0 "$job"
grep -q "resuming .* at step $step" "tftrain-$job.log" || fail "the job did not go on at step $step"
fitted e $((step + 500))
job=$(submit j "$files/slurm.sbatch" "${endless[@]}")
until_ok logged j
scancel "$job"
until_ok job_is_over "$job"
[ -n "$(saved_step j)" ] || fail "a cancelled job saved nothing"

say "mpirun: two hosts x 2 tasks, parameter servers, divergence, and an end that saves"
# What mpirun takes for ssh: the other host is this one.
printf '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n' > rsh
chmod +x rsh
export OMPI_MCA_plm_rsh_agent=$work/rsh OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export HOSTS=127.0.0.1:2,127.0.0.2:2 GRACE=5
expect 0 env TRAIN_DIR=f "$files/openmpi.sh" line-fit
fitted f 1000
expect 0 env TRAIN_DIR=g PS=1 "$files/openmpi.sh" line-fit
fitted g 1000
expect 6 env TRAIN_DIR=h "$files/openmpi.sh" line-fit --learning-rate 1e30
TRAIN_DIR=i "$files/openmpi.sh" "${endless[@]}" > mpirun.out 2>&1 & mpirun=$!
until_ok logged i
kill "$mpirun"
! wait "$mpirun" || fail "mpirun was told to end, and ended with 0"
step=$(saved_step i)
[ -n "$step" ] || fail "told to end, mpirun's tasks saved nothing"
expect 0 env TRAIN_DIR=i "$files/openmpi.sh" line-fit --max-steps $((step + 500))
fitted i $((step + 500))

say "Kubernetes: the manifests' containers under their own names"
ln -s "$tftrain" "$work/tftrain"
unshare --mount --net "$python" "$files/../../.ci/check_manifests.py" "$work" "$files"/*.yaml
say "launchers: all ran"
