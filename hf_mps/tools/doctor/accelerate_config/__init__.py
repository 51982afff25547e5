"""Accelerate's configuration file for a Mac, written with reasons and repaired where it is wrong."""
