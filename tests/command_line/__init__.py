"""The command line, through real processes."""
