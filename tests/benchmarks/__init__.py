"""The benchmarks: each script runs, and the documents say what the results say."""
