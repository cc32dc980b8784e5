"""The sbatch file of a job: readable, commented, and no value in it runs anything.

One task per GPU, one ``srun``. The batch shell runs on the first node of the job; all it does is to name a meeting
point, start the step and, when the step has saved and stopped, put the job back into the queue: that is done in one
place, and not by the ranks.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from lit_fsdp import __version__
from lit_fsdp.launch.slurm_job import FOLDER, Job
from lit_fsdp.launch.slurm_meeting import meeting_point

EXIT_STOPPED = 75
_EXIT_INTERRUPTED = 130
_EXIT_UNHEARD = 138
"""Of a step one of whose processes died of SIGUSR1 (128 + 10): it came before Python could listen."""
_EXIT_TERMINATED = 143
"""Of a step one of whose processes died of SIGTERM (128 + 15): srun gives the highest code, not the first one."""

_GIVE_UP = """give_up() { echo "$1"; echo "$(date '+%F %T') ended with exit code 1"; exit 1; }"""
_BY_HAND = "go on by hand: lit-fsdp slurm submit with the same words and --ckpt_path last"
_SAID = 'said=$(stat -c %s "$logs/$SLURM_JOB_ID.log" 2>/dev/null || echo 0) # what earlier starts have said\n'


def render(job: Job) -> str:
    """The script that ``sbatch`` takes."""
    parts = [_head(job), _options(job), _body(job)]
    return "\n".join(parts)


def sbatch_value(text: str) -> str:
    """A value of an ``#SBATCH`` line: sbatch splits at blanks and knows quotes and backslashes, but runs no shell."""
    if text and all(c.isalnum() or c in "-_./:,=@%+[]&|*()" for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _head(job: Job) -> str:
    what = f"{job.gpus_per_node} GPUs" if job.gpus_per_node else f"{job.tasks_per_node} processes on CPUs"
    return f"""#!/bin/bash
# lit_fsdp {__version__}: {_commented(job.name)} on {job.nodes} node(s) with {what} each
# Written by `lit-fsdp slurm render`; `lit-fsdp slurm submit` puts it into the run folder and submits it.
"""


def _commented(text: str) -> str:
    return " ".join(text.split())


def _options(job: Job) -> str:
    config = job.config
    logs = f"{job.run_folder}/{FOLDER}".replace("%", "%%")
    lines: list[tuple[str, str | int | None]] = [
        ("job-name", job.name),
        ("nodes", job.node_range),
        *_size_of_a_node(job),
        ("gpus-per-node", job.gpus_per_node or None),
        ("cpus-per-task", config.cpus_per_task),
        ("mem", config.mem),
        ("time", config.time),
        ("partition", config.partition),
        ("account", config.account),
        ("qos", config.qos),
        ("constraint", config.constraint),
        ("dependency", config.dependency),
        ("array", None if config.seeds is None else f"0-{len(config.seeds) - 1}"),
        ("output", f"{logs}/%j.log"),
        ("open-mode", "append"),
    ]
    found = [f"#SBATCH --{name}={sbatch_value(str(value))}" for name, value in lines if value is not None]
    found.append(f"# {config.signal_lead_seconds} s before the time limit every process saves at the end of its step")
    found.append(f"#SBATCH --signal=USR1@{config.signal_lead_seconds}")
    found.append(f"#SBATCH --{'requeue' if config.requeue and config.max_requeues else 'no-requeue'}")
    for option in config.extra or []:
        name, equals, value = option.partition("=")
        found.append(f"#SBATCH {name}={sbatch_value(value)}" if equals else f"#SBATCH {option}")
    return "\n".join(found) + "\n"


def _size_of_a_node(job: Job) -> list[tuple[str, str | int | None]]:
    """Tasks per node; for a range of nodes cores, as SLURM would hold on to the number of tasks of the first start.

    A job that lost a node would then wait for it, although fewer nodes are allowed (seen with SLURM 22.05).
    """
    if not job.node_counts:
        return [("ntasks-per-node", job.tasks_per_node)]
    return [("mincpus", job.tasks_per_node * (job.config.cpus_per_task or 1))]


def _body(job: Job) -> str:
    return "\n".join([_surroundings(job), _start(job), meeting_point(job), _run(job), _after(job)])


def _surroundings(job: Job) -> str:
    """What users add comes first and without our shell options: files that load modules read unset variables."""
    config = job.config
    lines = ["trap : USR1 # meant for the processes, never for this shell"]
    if config.env_file:
        path = Path(config.env_file).expanduser().absolute()  # bash would look for a bare name in PATH
        said = shlex.quote(f"slurm.env_file {_commented(str(path))} ended with an error: let its last line succeed")
        lines.append(f". {shlex.quote(str(path))} || {{ echo {said} >&2; exit 1; }}")
    for name, value in (config.env or {}).items():
        lines.append(f"export {name}={shlex.quote(value)}")
        if config.container and config.container_runtime == "apptainer":  # else the image's own value wins
            lines.append(f"export APPTAINERENV_{name}={shlex.quote(value)}")
    if config.setup:
        lines += ["# slurm.setup", *config.setup]
    return "\n".join(lines) + "\n"


def _start(job: Job) -> str:
    seeds = job.config.seeds
    lines = [
        "set +e -uo pipefail",
        f"run_folder={shlex.quote(str(job.run_folder))}",
        f"logs={shlex.quote(f'{job.run_folder}/{FOLDER}')}",
        "restarts=${SLURM_RESTART_COUNT:-0}",
        _GIVE_UP,
        *(_cap(job.config.max_requeues) if job.config.requeue else []),
        f"words=(fit --config {shlex.quote(str(job.recipe))})",
    ]
    if seeds is None:
        lines.append("job=$SLURM_JOB_ID")
    else:
        lines += [
            "# not SLURM_JOB_ID: one task of the array has the number of the array, which means all of them",
            "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
            f"seeds=({' '.join(map(str, seeds))})",
            "seed=${seeds[$SLURM_ARRAY_TASK_ID]}",
            'run_folder="$run_folder/seed-$seed"',
            'words+=(--seed_everything "$seed" --trainer.default_root_dir "$run_folder")',
        ]
    lines += [
        "newest() { (cd \"$run_folder/checkpoints\" 2>/dev/null && compgen -G 'step-*') | sort | tail -n 1; }",
        "before=$(newest)",
        "# how often the ranks have written that one of them was lost without a word",
        'silent() { cat "$logs/$SLURM_JOB_ID".rank-*.log 2>/dev/null | grep -cE '
        "'lost contact: (no word from rank|rank .* did not come)'; }",
        "gone=$(silent)",
        "# a job that was put back into the queue goes on from its last checkpoint, if it had come as far as one",
        'if [ "$restarts" -gt 0 ] && [ -n "$before" ]; then',
        "  words+=(--ckpt_path last)",
    ]
    if job.ckpt_path:
        lines += ["else", f"  words+=(--ckpt_path {shlex.quote(job.ckpt_path)})"]
    lines.append("fi")
    if job.node_counts:
        lines += [
            "# of the nodes that it was given, as many as the recipe can run on",
            f"for nodes in {' '.join(map(str, job.node_counts))}; do",
            '  if [ "$nodes" -le "$SLURM_JOB_NUM_NODES" ]; then break; fi',
            "done",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$nodes" | paste -sd ,)',
            'words+=(--trainer.num_nodes "$nodes")',
        ]
    return "\n".join(lines) + "\n"


def _cap(most: int) -> list[str]:
    """SLURM itself puts a job back that was preempted or lost a node, however often that happens."""
    why = f"not started again: {most} times are enough (slurm.max_requeues), whoever caused them; {_BY_HAND}"
    return [f'if [ "$restarts" -gt {most} ]; then', f'  give_up "{why}"', "fi"]


def _run(job: Job) -> str:
    config = job.config
    flags = ["--kill-on-bad-exit=1", "--export=ALL", "--open-mode=append", '--output="${logs//%/%%}/%j.rank-%t.log"']
    if config.cpu_bind != "none":
        flags.append(f"--cpu-bind={shlex.quote(config.cpu_bind)}")
    if config.cpus_per_task:
        flags.append(f"--cpus-per-task={config.cpus_per_task}")  # srun no longer takes it from sbatch
    if job.node_counts:  # sbatch was not told
        flags += [
            '--nodes="$nodes" --nodelist="$hosts"',
            f'--ntasks="$((nodes * {job.tasks_per_node}))" --ntasks-per-node={job.tasks_per_node}',
        ]
    command = " ".join(shlex.quote(word) for word in job.command)
    if config.container and config.container_runtime == "pyxis":
        flags += _pyxis_flags(job)
    elif config.container:
        binds = " ".join(f"--bind {shlex.quote(mount)}" for mount in job.mounts)
        nvidia = "--nv " if job.gpus_per_node else ""
        image = shlex.quote(job.image)
        command = f'apptainer exec {nvidia}{binds} --bind "$PWD" --pwd "$PWD" {image} {command}'
    joined = " \\\n  ".join(flags)
    noted = _SAID if config.requeue else ""
    return f"""# one process per GPU; the output of rank r goes to JOB.rank-r.log. After one that died srun sends
# SIGTERM to the others: those that cannot listen yet ignore it, or their exit code would hide the one that matters
{noted}echo "$(date '+%F %T') start $restarts on $SLURM_JOB_NODELIST, meeting at $MASTER_ADDR:$MASTER_PORT"
srun {joined} \\
  sh -c 'trap "" TERM; exec "$@"' sh \\
  {command} "${{words[@]}}"
code=$?
"""


def _pyxis_flags(job: Job) -> list[str]:
    """The image, in the folder that the job was submitted from: relative paths of the recipe mean that one."""
    config = job.config
    listed = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in job.mounts)
    flags = [
        f"--container-image={shlex.quote(job.image)}",
        f'--container-mounts={shlex.quote(listed)}",$PWD:$PWD"',
        '--container-workdir="$PWD"',
    ]
    if config.env:  # else the image's own values win
        flags.append(f"--container-env={','.join(config.env)}")
    return flags


def _after(job: Job) -> str:
    if not job.config.requeue:
        return 'echo "$(date \'+%F %T\') ended with exit code $code"\nexit "$code"\n'
    stopped, unheard, cap = EXIT_STOPPED, _EXIT_UNHEARD, job.config.max_requeues
    interrupted = _EXIT_INTERRUPTED
    return f"""# {stopped}: saved and stopped on a signal; {unheard}: SIGUSR1 came before anything listened.
# Above 128: a rank was killed, by the kernel, an operator or a watchdog; or the others lost one without a word from it.
# That is worth another try if the job had come further than where it started. A job that ended in any other way is not
# tried again.
echo "$(date '+%F %T') ended with exit code $code"
# one that was not even that far is known by what srun says of the others
if [ "$code" -eq {_EXIT_TERMINATED} ] && tail -c "+$((said + 1))" "$logs/$SLURM_JOB_ID.log" 2>/dev/null |
  grep -E 'tasks? .*: (User defined signal 1|Exited with exit code {stopped})' >/dev/null; then
  code={stopped}
  echo "a rank was ended before it listened, after another one had stopped"
fi
again=
case $code in
0 | {interrupted}) ;;
{stopped} | {unheard}) again=yes ;;
*)
  # what the ranks say of each other
  tail -qn 50 "$logs/$SLURM_JOB_ID".rank-*.log 2>/dev/null | grep 'lost contact: ' | sort -u | tail -n 3
  lost=
  if [ "$code" -gt 128 ]; then
    lost="a rank was killed (signal $((code - 128))), or hung until srun did it"
  elif [ "$(silent)" -gt "$gone" ]; then
    lost="a rank was killed, stopped, hung or was cut off"
  fi
  if [ -n "$lost" ]; then
    echo "$lost"
    if [ "$(newest)" != "$before" ]; then again=yes; else echo "no checkpoint was made since this start"; fi
  fi
  ;;
esac
[ "$code" -ne {unheard} ] || code={stopped}
if [ -n "$again" ] && [ ! -e "$logs/cancelled-$SLURM_JOB_ID" ]; then
  if [ "$restarts" -lt {cap} ]; then
    echo "back into the queue, $((restarts + 1)) of {cap}"
    scontrol requeue "$job" && sleep 60 # the requeue ends this script
    echo "SLURM has not taken it back; {_BY_HAND}"
  else
    echo "not put back into the queue: {cap} times are enough (slurm.max_requeues), whoever caused them"
    echo "{_BY_HAND}"
  fi
fi
exit "$code"
"""
