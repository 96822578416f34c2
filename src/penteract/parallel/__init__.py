"""The five dimensions of parallelism, one file each: what each rank holds, and its redistributions."""
