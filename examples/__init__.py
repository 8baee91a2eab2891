"""Examples: each script is read from top to bottom, and `shared` has what several of them need."""
