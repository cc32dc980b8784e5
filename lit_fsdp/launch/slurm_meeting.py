"""The lines of a job's script that say where its ranks meet, and as which run they log."""

from __future__ import annotations

import shlex

from lit_fsdp.launch.slurm_job import Job

_PORTS = (20000, 10000)
"""First port and how many follow: below the range from which systems give out ports (32768 on Linux)."""


def meeting_point(job: Job) -> str:
    """Address and port for all starts of the job, found anew by each, and the number of its run of W&B."""
    port = job.config.master_port
    own = "slurm-${SLURM_CLUSTER_NAME:-cluster}-$job"
    # a number that somebody gives is of one run, and every seed is another
    given = f"${{WANDB_RUN_ID:-{own}}}" if job.config.seeds is None else f"${{WANDB_RUN_ID:+$WANDB_RUN_ID-}}{own}"
    which = "a port by the job's number that nobody listens on" if port is None else "the port of slurm.master_port"
    lines = [
        f"# where the ranks meet: the first node, and {which}",
        *_address(job.config.master_addr),
        *_port(port),
        "export MASTER_ADDR MASTER_PORT",
        "# one run of W&B, however often the job starts",
        f'export WANDB_RUN_ID="{given}"',
        'export WANDB_RESUME="${WANDB_RESUME:-allow}"',
    ]
    return "\n".join(lines) + "\n"


def _address(given: str | None) -> list[str]:
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    if given is None:
        return [f"MASTER_ADDR={first}"]
    address = '"$node"'.join(shlex.quote(part) if part else "" for part in given.split("{node}"))
    return [f"node={first}", f"MASTER_ADDR={address}"]


def _port(given: int | None) -> list[str]:
    taken = '(exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null'
    if given is None:
        first, count = _PORTS
        return [
            f"MASTER_PORT=$(({first} + SLURM_JOB_ID % {count}))",
            f"while {taken}; do MASTER_PORT=$((MASTER_PORT + 1)); done",
        ]
    why = "somebody listens on $MASTER_ADDR:$MASTER_PORT already: set another slurm.master_port, or drop it"
    return [f"MASTER_PORT={given}", f"if {taken}; then", f'  give_up "{why}"', "fi"]
