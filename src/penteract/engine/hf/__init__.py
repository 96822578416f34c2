"""Hugging Face folders (config.json and safetensors files), read and written by slices."""
