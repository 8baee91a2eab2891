"""The command line, `hf-synthesizer`: each command is one call of the Python API. The only room that prints.

Heavy packages are imported only when a command needs them, so --help is fast.
"""
