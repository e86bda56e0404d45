"""Every comparison with a peer: `python -m benchmarks NAME [--json]`."""
