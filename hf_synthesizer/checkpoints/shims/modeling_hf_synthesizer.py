"""Lets `trust_remote_code=True` load this checkpoint: its code is the installed package hf_synthesizer.

The file lies in every checkpoint that hf_synthesizer saves. It holds no model code of its own.
"""

HOW_TO_INSTALL = "{{ how_to_install }}"

try:
    from hf_synthesizer.auto import remote_class
except ModuleNotFoundError as error:
    if error.name != "hf_synthesizer":
        raise
    raise ImportError(
        "This checkpoint holds synthesized attention, which the package hf_synthesizer knows how to run, and that is "
        f"not installed. Install it ({HOW_TO_INSTALL}), then load the checkpoint again."
    ) from error


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return remote_class(name)
