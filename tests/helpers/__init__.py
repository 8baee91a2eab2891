"""What several tests need: tiny models and data, naive loops, a Hub on loopback, scripts that tests start."""
