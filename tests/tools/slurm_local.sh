#!/bin/bash
# slurm_local.sh up|down|status [N_NODES]   one-machine Slurm with N virtual nodes on loopback (run as root)
#   ACCT=1 adds slurmdbd + a private MariaDB, so that sacct works.  GPUS=4 fake GPUs a node (0 = none), CPUS=4 a node.
#   SLURM_LOCAL_ROOT=/tmp/slurm-local  BASEPORT=17000: give both another value to run a second cluster beside the first.
#   eval "$(slurm_local.sh up 8)"  exports SLURM_CONF for the client commands.
# For a machine without systemd; no cgroup control needed. Debian packages (tried with 22.05.8):
#   apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge [slurmdbd mariadb-server]
# Everything lives under SLURM_LOCAL_ROOT and listens on 127.0.0.1 only; `down` stops only daemons started from there.
# Pitfalls:
#   * AuthInfo=socket= is NOT used for connections to slurmdbd: AccountingStoragePass must also be the munge socket.
#   * gres/gpu without a File= makes the node INVAL ("count reported lower than configured (0 < 4)"); any file will do.
#   * AccountingStorageTRES=gres/gpu is fatal without slurmdbd; so is a first start with slurmdbd down (no TRES).
#   * proctrack/cgroup + task/cgroup also work where cgroup v1 is mounted and writable (CgroupPlugin=cgroup/v1);
#     linuxproc is the portable default.
#   * installing slurm-wlm-emulator silently switches the slurmctld/slurmd alternatives to the emulator.
#   * munged must run as its own user with a 0700 key directory.
#   * CommunicationParameters=NoInAddrAny binds slurmd (and slurmdbd, in its own file) to loopback; slurmctld needs NoCtldInAddrAny too.
#   * pgrep -x 'a|b|c' matches nothing when the whole pattern is longer than 15 characters: ask for one name at a time.
set -euo pipefail
ROOT=${SLURM_LOCAL_ROOT:-${TMPDIR:-/tmp}/slurm-local}
N=${2:-8}
CPUS=${CPUS:-4}            # virtual CPUs per node (may oversubscribe the host)
GPUS=${GPUS:-4}            # fake GPUs per node (counted by Slurm, no device behind them)
ACCT=${ACCT:-0}            # 1 = slurmdbd + mariadb (sacct), 0 = jobcomp text file only
BASEPORT=${BASEPORT:-17000}
export SLURM_CONF=$ROOT/slurm.conf

die() { echo "slurm_local.sh: $*" >&2; exit 1; }
ours() {   # pids of the named daemons that were started from our ROOT
  local name p
  for name in "$@"; do
    for p in $(pgrep -x "$name" || true); do
      if { tr '\0' '\n' < "/proc/$p/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"; } 2>/dev/null; then echo "$p"; fi
    done
  done
}
wait_gone() { local i; for i in $(seq 50); do [ -z "$(ours "$@")" ] && return 0; sleep 0.1; done; return 1; }

conf() {
  mkdir -p "$ROOT"/{state,log,spool,run,db}
  chmod 755 "$ROOT" "$ROOT"/*
  local ports nodes gres="" g
  ports=$((BASEPORT+1))-$((BASEPORT+N)); nodes="n[1-$N]"
  if [ "$N" = 1 ]; then ports=$((BASEPORT+1)); nodes=n1; fi
  if [ "$GPUS" -gt 0 ]; then gres="Gres=gpu:$GPUS"; fi
  cat > "$SLURM_CONF" <<C
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$BASEPORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$ROOT/run/munge.sock
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.%n.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MailProg=/bin/true
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,bf_resolution=1,bf_max_job_test=1000,bf_continue,sched_min_interval=100000,permit_job_expansion
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
$([ "$ACCT" = 1 ] && printf 'PriorityType=priority/multifactor\nPriorityWeightAge=1000\nPriorityWeightQOS=1000\n' || echo PriorityType=priority/basic)
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=3600
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=60
MessageTimeout=30
OverTimeLimit=0
JobCompType=jobcomp/filetxt
JobCompLoc=$ROOT/log/jobcomp.txt
AccountingStorageType=$([ "$ACCT" = 1 ] && echo accounting_storage/slurmdbd || echo accounting_storage/none)
$([ "$ACCT" = 1 ] && printf 'AccountingStorageTRES=gres/gpu\nAccountingStorageHost=localhost\nAccountingStoragePort=%s\nAccountingStoragePass=%s\n' $((BASEPORT+900)) "$ROOT/run/munge.sock")
NodeName=$nodes NodeHostname=localhost NodeAddr=127.0.0.1 Port=$ports CPUs=$CPUS RealMemory=4000 $gres State=UNKNOWN
PartitionName=batch Nodes=$nodes Default=YES OverSubscribe=EXCLUSIVE MaxTime=02:00:00 DefaultTime=00:05:00 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high  Nodes=$nodes OverSubscribe=EXCLUSIVE MaxTime=02:00:00 State=UP PriorityTier=10 PreemptMode=OFF
C
  mkdir -p "$ROOT/dev"
  echo 'AutoDetect=off' > "$ROOT/gres.conf"
  if [ "$GPUS" -gt 0 ]; then   # gres/gpu wants a File=, any file will do
    for g in $(seq 0 $((GPUS-1))); do : > "$ROOT/dev/gpu$g"; done
    g="[0-$((GPUS-1))]"; if [ "$GPUS" = 1 ]; then g=0; fi
    echo "NodeName=$nodes Name=gpu File=$ROOT/dev/gpu$g" >> "$ROOT/gres.conf"
  fi
}
munge_up() {
  install -d -o munge -g munge -m 700 "$ROOT/munge"; install -d -o munge -g munge -m 755 "$ROOT/run"
  [ -s "$ROOT/munge/key" ] || { head -c 128 /dev/urandom > "$ROOT/munge/key"; }
  chown munge: "$ROOT/munge/key"; chmod 400 "$ROOT/munge/key"
  runuser -u munge -- munged --force --socket="$ROOT/run/munge.sock" --key-file="$ROOT/munge/key" \
    --pid-file="$ROOT/run/munged.pid" --log-file="$ROOT/munge/log" --seed-file="$ROOT/munge/seed"
}
db_up() {
  # a private MariaDB (local socket and loopback port, throw-away password), then slurmdbd
  install -d -o mysql -g mysql -m 755 "$ROOT/db"
  [ -d "$ROOT/db/mysql" ] || mariadb-install-db --user=mysql --datadir="$ROOT/db" --auth-root-authentication-method=socket >/dev/null 2>&1
  setsid mariadbd --no-defaults --user=mysql --datadir="$ROOT/db" --socket="$ROOT/db/s.sock" --bind-address=127.0.0.1 --port=$((BASEPORT+906)) \
     --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 --pid-file="$ROOT/db/pid" >"$ROOT/log/mariadb.log" 2>&1 < /dev/null &
  for i in $(seq 100); do mariadb-admin -S "$ROOT/db/s.sock" ping >/dev/null 2>&1 && break; sleep 0.1; done
  mariadb -S "$ROOT/db/s.sock" -e "CREATE DATABASE IF NOT EXISTS slurm_acct_db; CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'slurm'; CREATE USER IF NOT EXISTS slurm@127.0.0.1 IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct_db.* TO slurm@localhost; GRANT ALL ON slurm_acct_db.* TO slurm@127.0.0.1;"
  cat > "$ROOT/slurmdbd.conf" <<C
AuthType=auth/munge
AuthInfo=socket=$ROOT/run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
CommunicationParameters=NoInAddrAny
DbdPort=$((BASEPORT+900))
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((BASEPORT+906))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile=$ROOT/log/slurmdbd.log
PidFile=$ROOT/run/slurmdbd.pid
C
  chmod 600 "$ROOT/slurmdbd.conf"
  slurmdbd
  for i in $(seq 50); do timeout 5 sacctmgr -n list cluster >/dev/null 2>&1 && break; sleep 0.1; done
  sacctmgr -iQ add cluster local >/dev/null 2>&1 || true
  sacctmgr -iQ add account test cluster=local >/dev/null 2>&1 || true
  sacctmgr -iQ add user "$(id -un)" account=test cluster=local >/dev/null 2>&1 || true
}
case ${1:-} in
up)
  [ "$(id -u)" = 0 ] || die "run as root"
  [ -z "$(ours slurmctld slurmd slurmdbd munged mariadbd)" ] || die "already running from $ROOT: run 'down' first"
  t0=$(date +%s%N); conf; munge_up
  [ "$ACCT" = 1 ] && db_up
  slurmctld -f "$SLURM_CONF"
  for i in $(seq "$N"); do slurmd -f "$SLURM_CONF" -N "n$i"; done
  idle=0
  for i in $(seq 300); do
     idle=$(sinfo -h -N -p batch -t idle -o %N 2>/dev/null | wc -l) || true
     [ "$idle" -ge "$N" ] && break; sleep 0.1; done
  echo "export SLURM_CONF=$SLURM_CONF"
  dt=$((($(date +%s%N)-t0)/10000000)); printf '# %s of %s nodes idle after %d.%02d s\n' "$idle" "$N" $((dt/100)) $((dt%100)) >&2
  [ "$idle" -ge "$N" ] || die "not all nodes came up: see $ROOT/log" ;;
down)
  [ -s "$SLURM_CONF" ] || die "nothing to stop: no $SLURM_CONF"
  if [ -n "$(ours slurmctld)" ]; then
    timeout 10 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 10 scancel 2>/dev/null || true; sleep 1
    timeout 10 scontrol shutdown 2>/dev/null || true
  fi
  wait_gone slurmctld slurmd slurmstepd || true
  for p in $(ours slurmstepd slurmd slurmctld); do kill -9 "$p" 2>/dev/null || true; done
  for d in slurmdbd munged mariadbd; do   # in this order: slurmdbd flushes into the database
    for p in $(ours "$d"); do kill "$p" 2>/dev/null || true; done
    wait_gone "$d" || true
  done
  left=$(ours slurmstepd slurmd slurmctld slurmdbd munged mariadbd)
  [ -z "$left" ] || die "still running: $left" ;;
status) sinfo; squeue ;;
*) sed -n 2,7p "$0"; exit 2 ;;
esac
