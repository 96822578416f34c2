"""Weights in Hugging Face's form: a folder with config.json and safetensors files, read and written by slices."""
