"""LoRA READ: add ``scale * (h A^T) B^T`` with an adapter of its own for every row."""
