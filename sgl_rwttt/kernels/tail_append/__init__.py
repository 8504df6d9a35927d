"""TailBufferUpdate: put new evidence (h rows and target rows) into open pages."""
