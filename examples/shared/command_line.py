"""A script as a program: its flags, one line for a user's mistake, and several processes that end together."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

from torch import distributed
from transformers import HfArgumentParser

from hf_synthesizer.errors import InvalidConfigError, SynthesizerError


def run_script(main: Callable[[], Any]) -> None:
    """Run a script's `main` as the program that it is: a user's mistake is one line, several processes leave together."""
    try:
        main()
    except SynthesizerError as error:
        first = os.environ.get("RANK", "0") == "0"  # of several processes one says it
        raise SystemExit(f"error: {error}" if first else 1) from None
    leave_together()


def leave_together() -> None:
    """Wait for all processes of a training that has succeeded, and end their group; a process that is alone goes on.

    A thread of gloo lets go of the last exchange's tensors only with the interpreter's lock. A process that ends before is
    aborted ("terminate called without an active exception"), and one that frees the group before waits for ever: it holds
    the lock while it joins the thread. So the lock is left to the thread for a moment.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        time.sleep(0.1)
        distributed.destroy_process_group()


def parse(classes: tuple[Any, ...], argv: list[str]) -> tuple[Any, ...]:
    """The arguments, from flags, or from one JSON file that is named instead.

    Raises:
        InvalidConfigError: for a flag that there is not, and a value that it cannot have.
    """
    # Each flag with an underscore has a twin with a hyphen: the beginning of one would be that of two.
    parser = _Parser(classes, allow_abbrev=False)
    if len(argv) == 1 and argv[0].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(argv[0]))
    *found, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
        raise InvalidConfigError(
            f"There is no {flag}{f'; did you mean {near[0]}?' if near else ': --help lists all.'}"
        )
    return tuple(found)


class _Parser(HfArgumentParser):
    """One sentence for a mistake, instead of all flags before it."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message[:1].upper()}{message[1:]}; --help says more.")
