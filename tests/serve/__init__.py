"""Tests of toolkit/serve."""
