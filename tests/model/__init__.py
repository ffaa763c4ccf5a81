"""Tests of toolkit/model."""
