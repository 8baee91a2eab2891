"""GLUE and SuperGLUE: tasks, data, metrics, and a conversion with fine-tuning; for the command line, the examples and the
benchmark. Needs the packages of the extra `examples`."""
