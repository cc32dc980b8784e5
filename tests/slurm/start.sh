#!/bin/bash
# start.sh DIR: a private SLURM cluster on this host (root; slurmctld, slurmd, slurm-client and munge are installed):
# one controller and two nodes, each in a UTS and mount namespace of its own, so that node1 and node2 resolve inside
# jobs and nothing of the host changes. Prints the path of slurm.conf. CPUs are counted four per node, whatever there is.
set -euo pipefail
dir=${1:?usage: start.sh DIR}
mkdir -p "$dir/state" "$dir/log"
dir=$(realpath "$dir")
conf=$dir/slurm.conf
here=$(dirname "$(realpath "$0")")
export PATH=$PATH:/usr/sbin:/sbin
nodes=2

run=$(mktemp -d -t slurm.XXXXXX) # short: the path of a unix socket has at most 107 characters
chmod 755 "$run"
echo "$run" >"$dir/run"
(umask 077 && head -c 1024 /dev/urandom >"$run/munge.key")
# outside of the ports that jobs meet at (20000 to 29999), and of those that Linux gives out (from 32768)
port=$(python3 - "$nodes" <<'PY'
import random, socket, sys
while True:
    first = random.randrange(30000, 32700)
    try:
        for offset in range(int(sys.argv[1]) + 1):
            with socket.socket() as probe:
                probe.bind(("", first + offset))
        print(first)
        break
    except OSError:
        continue
PY
)
# proctrack/cgroup signals only the tasks, as real clusters do; it needs the v1 freezer, and one cluster per host
freezer=/sys/fs/cgroup/freezer
if [ -w $freezer/tasks ] && [ ! -e $freezer/slurm_node1 ]; then
  track=cgroup
  printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n' >"$dir/cgroup.conf"
  echo $freezer >"$run/freezer"
else
  track=linuxproc
fi
host=$(hostname -s)
cat >"$conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
# how long a requeued job waits, too; 120 s by default
AuthInfo=socket=$run/munge.sock,cred_expire=10
FirstJobId=$((1000 + RANDOM))
StateSaveLocation=$dir/state
SlurmdSpoolDir=$run/%n
SlurmctldPidFile=$run/slurmctld.pid
SlurmdPidFile=$run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/$track
TaskPlugin=task/none
# a requeued job is looked at by these rounds alone; 60 s and 30 s by default
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=25
MessageTimeout=60
BatchStartTimeout=120
MinJobAge=3600
PropagateResourceLimits=NONE
NodeName=node[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1))-$((port + nodes)) CPUs=4 RealMemory=16000
PartitionName=test Nodes=ALL Default=YES State=UP
CONF
{ cat /etc/hosts; for i in $(seq "$nodes"); do echo "127.0.0.1 node$i"; done; } >"$run/hosts"

# the daemons write to files, or a caller's $(...) would wait for their end
exec 3>&1 >"$dir/log/start.out" 4>&2 2>&1 </dev/null
trap 'tail -n 20 "$dir"/log/* >&4; "$here/stop.sh" "$dir"' ERR
munged --force --key-file="$run/munge.key" --socket="$run/munge.sock" --pid-file="$run/munged.pid" \
  --log-file="$dir/log/munged.log" --seed-file="$run/munged.seed" 3>&- 4>&-
slurmctld -f "$conf" -i 3>&- 4>&-
for i in $(seq "$nodes"); do
  unshare --uts --mount --propagation private bash -c \
    'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -f "$3" -N "$1"' \
    _ "node$i" "$run/hosts" "$conf" 3>&- 4>&-
done
for _ in $(seq 1200); do
  if [ "$(SLURM_CONF=$conf timeout 5 sinfo -hNo %T 2>/dev/null | grep -c '^idle$')" = "$nodes" ]; then
    echo "$conf" >&3
    exit 0
  fi
  sleep 0.1
done
false # not ready after 120 s
