"""Lines of shell that users add to a job: what they would start, wait for, or end."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.config.run import RunConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_facts import Facts, Found
from lit_fsdp.launch.slurm_job import Job

_LAUNCHERS = {
    *("srun", "salloc", "sbatch", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "aprun", "jsrun"),
    *("torchrun", "deepspeed"),
}
_WITH_VERB = {"accelerate": ("launch",), "lit-fsdp": ("slurm submit",)}
_MODULES = re.compile(r"torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed")
_TERMINALS = {"tmux", "screen", "ipython", "ipython3", "jupyter-lab", "jupyter-notebook", "jupyter-console"}
_JUPYTER = ("lab", "notebook", "console", "server")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# What may stand before the word that is run.
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"}
_WRAPPERS = {"exec", "command", "builtin", "eval", "env", "nice", "nohup", "stdbuf", "sudo", "timeout", "xargs"}
_OPENING, _CLOSING = {"if", "case", "for", "while", "until", "select", "function", "{"}, {"fi", "esac", "done", "}"}
_ASSIGNMENT, _AMOUNT = re.compile(r"\w+\+?="), re.compile(r"\d+(\.\d+)?[smhd]?")
_PUNCTUATION = ";&|()`<>"
_PLAIN = re.compile(rf"[{_PUNCTUATION}]+|[^\s{_PUNCTUATION}]+")
_INSIDE = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_HERE = re.compile(r"(?<!<)<<-?\s*[\\'\"]?(\w+)")
_ARRAY = re.compile(r"\w\+?=\([^)]*$")
_CODE = re.compile(r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<=[^\s;&|(])#|[^#])*""")
"""A line up to its comment."""


@dataclass
class _Command:
    """The words of one command, quotes taken away."""

    words: list[str]
    after: str
    """What stands before it: ``;``, ``&&``, ``|``, ``(`` …"""
    has_input: bool
    """Whether its line reads from a file or a pipe."""


def shell_lines(job: Job) -> Iterator[tuple[str, str]]:
    """The lines of shell that users add to a job, each with its key, without texts that go over several lines."""
    config = job.config
    setup = [(f"slurm.setup[{i}]", part) for i, text in enumerate(config.setup or []) for part in text.splitlines()]
    yield from _without_texts(setup)
    if config.command:
        yield "slurm.command", shlex.join(config.command)
    text = _env_text(job)
    yield from _without_texts((f"slurm.env_file, line {i}", line) for i, line in enumerate(text.splitlines(), 1))


def _env_text(job: Job) -> str:
    path = Path(job.config.env_file).expanduser() if job.config.env_file else None
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path is not None and path.is_file() else ""
    except OSError as error:
        raise ConfigError(
            "slurm.env_file", f"{path} ({error.strerror})", "a file that can be read", "check its permissions"
        ) from None


def _without_texts(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Without the bodies of here-documents, of quotes and of arrays that a line leaves open."""
    until: Callable[[str], bool] | None = None
    for field, line in lines:
        if until is not None:
            until = None if until(line) else until
            continue
        yield field, line
        until = _left_open(line)


def _left_open(line: str) -> Callable[[str], bool] | None:
    """What tells the line that ends a text begun in this one."""
    code = match[0] if (match := _CODE.match(line)) else line
    if here := _HERE.search(code):
        return lambda later: later.lstrip("\t") == here[1]
    if _ARRAY.search(code):
        return lambda later: ")" in later
    for quote in ("'", '"'):
        bare = re.sub(r"\\.", "", re.sub(r'"[^"]*"' if quote == "'" else r"'[^']*'", "", code))
        if bare.count(quote) % 2:
            return lambda later, quote=quote: later.count(quote) % 2 == 1  # type: ignore[misc]
    return None


def no_launcher_inside(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse what starts processes, or waits for somebody to type, inside the job."""
    for field, line in shell_lines(job):
        whole = f"{line} fit" if field == "slurm.command" else line
        found = next((found for command in _commands(whole) if (found := _started(command))), None)
        if found is None or (found[0].startswith(("read", "select")) and line[:1].isspace()):
            continue  # inside of a block or function there may be input
        word, is_launcher = found
        allowed = "nothing that waits for a terminal: a batch job has none"
        if is_launcher:
            allowed = "no launcher: the script calls srun once, with one task per GPU"
        yield ConfigError(field, line.strip(), allowed, f"drop {word} from {field.split(',')[0]}")


def shell_is_whole(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse lines that bash cannot read, and those that end the job before it has begun."""
    config = job.config
    texts = {"slurm.setup": "\n".join(config.setup or [])}
    texts["slurm.env_file"] = _env_text(job)
    for field, text in texts.items():
        said = _bash_says(text)
        if said:
            yield ConfigError(field, said, "lines that bash can read", f"mend {field}; bash -n checks a file")
    yield from _ends_and_moves(job)


def _ends_and_moves(job: Job) -> Found:
    depth, before, goes_on = 0, "", False
    for field, line in shell_lines(job):
        key = re.split(r"[\[,]", field)[0]
        if key == "slurm.command":
            continue
        if key != before:
            depth, before, goes_on = 0, key, False
        in_brackets = "(" in line or ")" in line  # a subshell, whose exit and cd are its own, or a case
        depth = max(0, depth + line.rstrip().endswith("(") - (line.strip() == ")"))
        for command in _commands(line):
            word, *rest = command.words
            always = depth == 0 and command.after in ("", ";") and not ((goes_on and not command.after) or in_brackets)
            opens = sum(word in _OPENING for word in _leading(command.words))
            depth = max(0, depth + opens - (word in _CLOSING))
            if always and (word == "exit" or (word == "exec" and rest)):
                allowed = "lines after which the job goes on: the script runs the recipe below them"
                yield ConfigError(field, line.strip(), allowed, f"drop {word} from {before}")
                break
            if always and word in ("cd", "pushd"):
                yield (
                    f"{field} changes the folder: relative paths of the recipe are looked for there by the job, and "
                    "were checked from this one"
                )
        goes_on = line.rstrip().endswith(("\\", "&&", "|"))


def _leading(words: Sequence[str]) -> list[str]:
    """The keywords at the head of a command, and the first word after them."""
    found = []
    for word in words:
        found.append(word)
        if word not in _KEYWORDS:
            break
    return found


def _bash_says(text: str) -> str:
    """Why bash cannot read these lines; nothing if it can, or is not here."""
    if not text.strip() or shutil.which("bash") is None:
        return ""
    done = subprocess.run(
        ["bash", "-O", "extglob", "-n"],  # noqa: S607
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return " ".join(done.stderr.split())[:300]  # of a here-document without an end it only warns


def _commands(line: str) -> Iterator[_Command]:
    """The commands of a line of shell, those in ``$( )`` too; an approximation, as only bash knows."""
    match = _CODE.match(line)
    code = match[0] if match else line
    code = re.sub(r"[<>]\([^()]*\)", "FILE", re.sub(r"\{\w+\}(?=[<>])", "", code))
    lexer = shlex.shlex(code, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:  # a quote that another line closes
        tokens = [word.strip("'\"\\") for word in _PLAIN.findall(code)]
    signs = [*(token for token in tokens if token and set(token) <= set(_PUNCTUATION)), ";"]
    has_input = any("<" in sign or "|" in sign.replace("||", "") for sign in signs)
    words: list[str] = []
    after, skips = "", False
    for token in (*tokens, ";"):
        if skips:  # the file of a redirection
            skips = False
        elif token not in signs:
            words.append(token)
            for inner in _INSIDE.finditer(token):
                yield from _commands(inner[1] or inner[2] or "")
        elif "(" not in token and {"<", ">"} & set(token):
            skips = True
            words = words[:-1] if words and words[-1].isdigit() else words
        else:
            if words and not token.startswith("()"):  # else it is a function's name
                yield _Command(words, after, has_input)
            words, after = [], token


def _started(command: _Command) -> tuple[str, bool] | None:
    """The launcher, or what waits for a terminal, that a command is, and which of both."""
    words = _without_wrappers(command.words)
    if not words:
        return None
    name, *rest = words
    base = name.rpartition("/")[2]
    if base in _LAUNCHERS:
        return None if {"--version", "--help", "-V"} & set(rest) else (base, True)
    if any(" ".join(rest).startswith(verb) for verb in _WITH_VERB.get(base, ())):
        return f"{base} {' '.join(rest[: 1 + (base == 'lit-fsdp')])}", True
    if _PYTHON.fullmatch(base) and "-m" in rest:
        module, *verb = [*rest[rest.index("-m") + 1 :], ""]
        is_own = module == "lit_fsdp" and verb[:2] == ["slurm", "submit"]
        if is_own or _MODULES.fullmatch(module):
            return module + is_own * " slurm submit", True
    if "--pty" in rest and base not in ("echo", "printf"):
        return "--pty", False
    if base in _SHELLS or _PYTHON.fullmatch(base):
        return _in_interpreter(base, rest, command.has_input)
    waits = base in _TERMINALS or (base == "jupyter" and rest[:1] and rest[0] in _JUPYTER)
    is_loop = command.words[0] in ("while", "until")  # whose input may stand behind its end
    waits = waits or (base in ("read", "select") and not command.has_input and not is_loop)
    return (" ".join(words[: 1 + (base == "jupyter")]), False) if waits else None


def _in_interpreter(name: str, rest: Sequence[str], has_input: bool) -> tuple[str, bool] | None:
    """What a shell is told to run by ``-c``; and a shell, or Python, that waits for input."""
    is_shell, i = name in _SHELLS, 0
    while i < len(rest) and rest[i][:1] in ("-", "+"):
        option = rest[i]
        if option == "--":
            break
        letters = option if is_shell else re.split("[WXcm]", option)[0]  # behind those comes a value
        if not option.startswith("--") and "i" in letters:
            return f"{name} {' '.join(rest[: i + 1])}", False
        if is_shell and not option.startswith("--") and "c" in option:
            inner = rest[i + 1] if i + 1 < len(rest) else ""
            return next((found for command in _commands(inner) if (found := _started(command))), None)
        if not is_shell and option[:2] in ("-c", "-m", "-V", "-h"):
            return None
        is_long = option.startswith("--")
        takes = option in ("--rcfile", "--init-file") if is_long else option[-1] in ("oO" if is_shell else "WX")
        i += 1 + takes
    asks = any(option in ("--version", "--help", "-V", "-h") for option in rest[:i])
    return None if i < len(rest) or has_input or asks else (" ".join([name, *rest]), False)


def _without_wrappers(words: Sequence[str]) -> list[str]:
    """The words from the program on that is run; none where its name is only asked for, as by ``command -v``."""
    rest, is_wrapped = list(words), False
    while rest:
        word = rest[0]
        if word == "command" and rest[1:2] and rest[1] in ("-v", "-V"):
            return []
        is_option = is_wrapped and (word.startswith("-") or _AMOUNT.fullmatch(word) is not None)
        if not (word in _KEYWORDS or word in _WRAPPERS or _ASSIGNMENT.match(word) or is_option):
            return rest
        is_wrapped |= word in _WRAPPERS or word == "time"
        rest = rest[1:]
    return rest
