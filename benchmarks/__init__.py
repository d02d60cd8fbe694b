"""Benchmarks of dlock and every peer, as ratios to a floor that runs in between. Figures: docs/benchmarks.md."""
