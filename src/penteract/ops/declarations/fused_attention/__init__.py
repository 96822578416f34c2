"""What the attention kernels of libraries declare."""
