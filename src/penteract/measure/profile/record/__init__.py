"""What one rank does to be profiled: bare steps, steps under a profiler, one that counts memory. It needs torch."""
