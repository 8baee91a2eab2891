"""The paper's tasks, trained from scratch."""
