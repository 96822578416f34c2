"""What a rehearsal looks at: buckets, registers, bytes, kernels, and whether all that ranks send is received."""
