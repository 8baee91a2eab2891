"""The command line, `hf-synthesizer`: each command is one call of the Python API. The only room that prints.

Nothing heavy is imported before a command needs it, so that help is there at once.
"""
