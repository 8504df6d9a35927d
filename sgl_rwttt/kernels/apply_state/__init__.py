"""READ: add the part of ``W h`` that the state contributes, ``h D^T + (h H^T) V``."""
