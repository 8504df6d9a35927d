"""Publish candidates: copy selected slots of one pool to slots of another, and only those."""
