"""Fold: consolidate a base and the pages since it into a new dense base."""
