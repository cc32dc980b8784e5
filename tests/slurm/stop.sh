#!/bin/bash
# stop.sh DIR: cancel the jobs, end the daemons by pid file, clean up (DIR/log stays). Idempotent.
dir=$(realpath "${1:?usage: stop.sh DIR}"); [ -f "$dir/run" ] || exit 0
run=$(cat "$dir/run"); export SLURM_CONF=$dir/slurm.conf
alive() { grep -qsE '^State:\s+[^ZX]' "/proc/$1/status"; }   # pid 1 may reap zombies late
if timeout 5 scancel --user=root 2>/dev/null; then
  for _ in $(seq 100); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
fi
for p in "$run"/slurmd.*.pid "$run/slurmctld.pid" "$run/munged.pid"; do
  pid=$(cat "$p" 2>/dev/null) || continue
  case $(cat "/proc/$pid/comm" 2>/dev/null) in slurmd*|slurmctld*|munged) ;; *) continue ;; esac
  kill "$pid"; for _ in $(seq 100); do alive "$pid" || break; sleep 0.1; done
  if alive "$pid"; then kill -9 "$pid"; fi
done
if [ -f "$run/freezer" ]; then
  find "$(cat "$run/freezer")"/slurm_node* -depth -type d -exec rmdir {} + 2>/dev/null
fi
rm -rf "$run" "$dir/run" "$dir/slurm.conf" "$dir/cgroup.conf" "$dir/state"
