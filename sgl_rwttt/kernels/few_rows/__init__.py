"""x W^T for few rows of x, float32 on the CPU: the products of a decode step."""
