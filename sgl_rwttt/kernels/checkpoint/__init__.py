"""Gather an owner's pages and base, all layers, into one piece of memory, and scatter it back."""
