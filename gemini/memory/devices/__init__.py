"""Devices: the CPU, CUDA, their memory, streams and windows."""
