"""What is saved, loaded, guarded and pushed."""
