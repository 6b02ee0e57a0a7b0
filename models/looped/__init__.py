"""Looped transformers: LoopLM with a cache per loop, MELT with one gated cache, and the way from one to the other."""
