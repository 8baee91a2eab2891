"""The examples, and the data that they read."""
