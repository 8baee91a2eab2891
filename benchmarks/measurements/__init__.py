"""How everything is measured and kept: the grid of cells, CSV lines, JSON runs, devices, bystanders."""
