"""Prefill attention on the CPU: the new tokens of one request after the KV that it has."""
