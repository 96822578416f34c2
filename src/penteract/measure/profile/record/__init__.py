"""What one rank does to be profiled: bare steps, steps under torch's profiler, and one that counts memory. It needs torch."""
