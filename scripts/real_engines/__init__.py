"""Checks of Ringway in front of real llama.cpp engines; started by `scripts/real-engines`."""
