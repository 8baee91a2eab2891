"""The page of attention, and plots."""
