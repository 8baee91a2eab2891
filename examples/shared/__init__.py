"""Code that several examples use: flags, files, models, metrics. Python finds it because a script's folder is on its path."""
