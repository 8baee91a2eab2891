"""Run a script as a program: parse its flags, print a user's mistake as one line, and end several processes together."""

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
    """Run the `main` of a script. A user's mistake is printed as one line, and several processes end together."""
    try:
        main()
    except SynthesizerError as error:
        first = os.environ.get("RANK", "0") == "0"  # of several processes one says it
        raise SystemExit(f"error: {error}" if first else 1) from None
    leave_together()


def leave_together() -> None:
    """Wait for all processes of a training that has succeeded, and end their group. A single process does nothing.

    A thread of gloo needs the interpreter's lock to free the tensors of the last exchange. A process that ends before is aborted
    ("terminate called without an active exception"). A process that frees the group before hangs, because it holds the lock while
    it joins the thread. So this function sleeps for a moment, which gives the lock to the thread.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        time.sleep(0.1)
        distributed.destroy_process_group()


def parse(classes: tuple[Any, ...], argv: list[str]) -> tuple[Any, ...]:
    """Parse the arguments from flags, or from one JSON file.

    Raises:
        InvalidConfigError: for an unknown flag or a value that is not allowed.
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
    """Reports a mistake as one sentence, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message[:1].upper()}{message[1:]}; --help says more.")
