"""BoundaryUpdate: the V rows of complete chunks from their target rows (In-Place TTT)."""
