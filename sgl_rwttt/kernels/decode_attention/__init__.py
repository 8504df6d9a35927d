"""Decode attention on the CPU: one query token per row against the row's slots of the KV pool."""
