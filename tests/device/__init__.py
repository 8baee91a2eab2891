"""What is asked of a device."""
