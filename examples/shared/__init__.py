"""What several examples need: flags, files, models, metrics. Python finds it because a script's own folder is on its path."""
