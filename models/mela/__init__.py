"""Mela: a hierarchical memory that learns at test time, read by a chunk-local decoder."""
