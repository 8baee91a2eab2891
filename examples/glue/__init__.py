"""What the GLUE examples and the GLUE benchmark share: tasks, data, metrics, conversion."""
