"""What is patched, undone, reported and refused."""
