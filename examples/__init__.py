"""Examples: read each script from top to bottom. `shared` holds the code that several scripts use."""
