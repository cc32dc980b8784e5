"""Entry point of ``lit-fsdp`` and ``python -m lit_fsdp``."""

import os
import sys
from collections.abc import Sequence

from lit_fsdp.commands import run
from lit_fsdp.config.words import as_flag
from lit_fsdp.errors import ConfigError
from lit_fsdp.exit_codes import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done; 1 the run failed or a check found something; 2 the recipe or the command line is wrong; 75 saved and
    stopped on SIGTERM or SIGUSR1; 76 a rank lost the others; 130 on Ctrl-C. Errors that a user can fix are
    printed without a traceback, and secrets of the environment and of the recipe are never printed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get("MPLBACKEND", "").startswith("module://"):  # of a notebook's kernel, in its environment only
        del os.environ["MPLBACKEND"]

    def act() -> int:
        try:
            return run(words)
        except ConfigError as error:
            from lit_fsdp.config.parser import recipe_keys  # takes a moment

            known = recipe_keys()
            for one in (error, *error.others):
                one.fix = as_flag(one, words, known)
            again = error.fix if error.fix != "remove it" else ""  # of several words after one flag
            error.others = [one for one in error.others if one.field not in words or one.fix != again]
            raise

    return exit_code_of(act, debug="--debug" in words)


def entry() -> None:
    """Run the command line; ``sys.exit`` is looked up afterwards, because W&B replaces it to see the exit code."""
    code = main()
    sys.exit(code)


if __name__ == "__main__":
    entry()
