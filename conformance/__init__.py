"""The faults of others, tried on this server: `baton conformance`."""
