"""The comparisons with peers: `python -m benchmarks NAME [--json]`."""
