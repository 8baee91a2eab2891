"""`python -m hf_synthesizer`: the command line."""

from .cli.app import main

main()
