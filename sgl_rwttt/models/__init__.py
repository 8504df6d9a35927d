"""The embedded model and the recipe that turns a plain checkpoint into a TTT checkpoint."""
