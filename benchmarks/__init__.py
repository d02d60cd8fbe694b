"""Ours and every peer, interleaved, as ratios to a floor measured in the same breath. Figures: docs/benchmarks.md."""
