"""For authors of update rules: the conformance suite of backends (docs/backends.md)."""
