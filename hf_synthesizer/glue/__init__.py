"""Classification and regression with GLUE, SuperGLUE and files of the same kind: what `evaluate` and `finetune` need."""
