"""Tests of toolkit/run."""
