"""Speed, measured against other implementations: `python -m benchmarks`."""
